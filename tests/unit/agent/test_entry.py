"""What a command is: Python of this environment, which starts from the template, or another program, which is said."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from holdfast.agent.workers.entry import Entry, entry_of
from holdfast.domain.errors import InvalidSpec
from holdfast.domain.job import LaunchSpec

PYTHON = sys.executable


@pytest.fixture
def program(tmp_path: Path) -> object:
    def write(text: str, name: str = "tool") -> str:
        path = tmp_path / name
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    return write


def command(tmp_path: Path, *args: str) -> Entry:
    launch = LaunchSpec(command="tool", args=args, cwd=str(tmp_path))
    return entry_of(launch, {"PATH": f"{tmp_path}{os.pathsep}/usr/bin:/bin"})


@pytest.mark.parametrize(
    "head",
    [
        f"#!{PYTHON}\n",
        f"#! {PYTHON}\nimport sys\n",
        f"#!{os.path.dirname(PYTHON)}/python3\n",
        f"#!/bin/sh\n'''exec' {PYTHON} \"$0\" \"$@\"\n' '''\n",
        f"#!/bin/sh\n'''exec' \"{PYTHON}\" \"$0\" \"$@\"\n' '''\n",
    ],
)
def test_a_console_script_of_this_environment_is_a_script(tmp_path: Path, program: object, head: str) -> None:
    path = program(f"{head}print(1)\n")  # type: ignore[operator]
    assert command(tmp_path, "train", "--lr", "1") == Entry("script", path, ("train", "--lr", "1"), str(tmp_path))


def test_a_console_script_found_by_env(tmp_path: Path, program: object) -> None:
    path = program("#!/usr/bin/env python3\n")  # type: ignore[operator]
    (tmp_path / "python3").symlink_to(PYTHON)  # another directory: another environment
    assert command(tmp_path).kind == "program"
    own = LaunchSpec(command=path, cwd=str(tmp_path))
    assert entry_of(own, {"PATH": os.path.dirname(PYTHON)}).kind == "script"


@pytest.mark.parametrize(
    "head",
    [
        "#!/bin/sh\necho\n",
        "#!/opt/other/bin/python3\n",
        f"#!{os.path.realpath(PYTHON)}\n",  # the same file, without this environment's packages
        f"#!{PYTHON} -O\n",  # an option changes what runs
        "\x7fELF",
        "",
        "#!",
        "#!/bin/sh\n'''exec'",
    ],
)
def test_everything_else_is_a_program_and_says_so(tmp_path: Path, program: object, head: str) -> None:
    path = program(head)  # type: ignore[operator]
    entry = command(tmp_path, "a")
    if (
        os.path.dirname(os.path.realpath(PYTHON)) == os.path.dirname(PYTHON)
        and "python" in head
        and "other" not in head
    ):
        pytest.skip("this interpreter is in no virtual environment")
    assert (entry.kind, entry.target, entry.args) == ("program", path, ("a",))
    assert "tool is not a Python program of" in entry.note


@pytest.mark.parametrize(
    ("args", "kind", "target", "rest"),
    [
        (("train.py", "-m", "x"), "script", "train.py", ("-m", "x")),
        (("-u", "train.py"), "script", "train.py", ()),
        (("-u", "-m", "pkg.train", "--lr"), "module", "pkg.train", ("--lr",)),
        (("-O", "train.py"), "program", PYTHON, ("-O", "train.py")),
        (("-c", "print(1)"), "program", PYTHON, ("-c", "print(1)")),
        (("missing.py",), "program", PYTHON, ("missing.py",)),
        ((), "program", PYTHON, ()),
    ],
)
def test_the_interpreter_itself(
    tmp_path: Path, args: tuple[str, ...], kind: str, target: str, rest: tuple[str, ...]
) -> None:
    (tmp_path / "train.py").touch()
    entry = entry_of(LaunchSpec(command=PYTHON, args=args, cwd=str(tmp_path)), {})
    expected = str(tmp_path / target) if kind == "script" else target
    assert (entry.kind, entry.target, entry.args) == (kind, expected, rest)


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (LaunchSpec(command="no-such-tool"), "command: 'no-such-tool' .* a program that exists on this node"),
        (LaunchSpec(script="/no/such.py"), "script: '/no/such.py' .* a file that exists on this node"),
        (LaunchSpec(module="json", cwd="/no/such"), "cwd: '/no/such' .* a directory that exists on this node"),
    ],
)
def test_what_is_not_on_this_node(launch: LaunchSpec, said: str) -> None:
    with pytest.raises(InvalidSpec, match=said):
        entry_of(launch, {"PATH": "/usr/bin"})


def test_a_directory_with_a_main(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="script"):
        entry_of(LaunchSpec(script=str(tmp_path)), {})
    (tmp_path / "__main__.py").touch()
    assert entry_of(LaunchSpec(script=str(tmp_path)), {}).kind == "script"
