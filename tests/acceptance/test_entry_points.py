"""`holdfast run --local` starts what torchrun starts, in the environment in which torchrun would: modules, packages, console
scripts and programs. What is Python starts from the template, the rest says that it does not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import Shell

REPORT = """
import json, os, sys
names = ("RANK", "WORLD_SIZE", "WANDB_PROJECT", "WANDB_API_KEY", "MODE", "FROM_FILE", "KEY", "RESTARTS")
path = os.path.join(os.environ["REPORTS"], os.environ["RANK"])
with open(path, "w") as file:
    json.dump({
        "argv": sys.argv, "name": __name__, "package": __package__, "cwd": os.getcwd(), "path": sys.path[0],
        "warm": "holdfast.train.warm.template" in sys.modules or "holdfast.train.warm.forked" in sys.modules,
        "env": {name: os.environ[name] for name in names if name in os.environ},
    }, file)
"""


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    (tmp_path / "reports").mkdir()
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "helper.py").write_text(REPORT)
    (tmp_path / "pkg" / "train.py").write_text(f"from . import __name__ as parent\nassert parent == 'pkg'\n{REPORT}")
    (tmp_path / "pkg" / "__main__.py").write_text(REPORT)
    tool = tmp_path / "tool"
    tool.write_text(f"#!{sys.executable}\n{REPORT}")
    other = tmp_path / "other.sh"
    other.write_text(f'#!/bin/sh\nexec "{sys.executable}" report.py "$@"\n')
    (tmp_path / "report.py").write_text(REPORT)
    for program in (tool, other):
        program.chmod(0o755)
    return Shell(tmp_path, {"REPORTS": str(tmp_path / "reports"), "WANDB_PROJECT": "llm", "WANDB_API_KEY": "k-1"})


def run(shell: Shell, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """What both ranks have reported, and what the command printed."""
    result = shell("run", "--local", "--nproc-per-node", "2", *arguments, timeout_s=120)
    assert result.code == 0, result.out + result.err
    shell.assert_nothing_runs()
    reports = sorted((shell.directory / "reports").iterdir())
    found = [json.loads(path.read_text()) for path in reports]
    for path in reports:
        path.unlink()
    assert [report["env"]["RANK"] for report in found] == ["0", "1"]
    return found, result.out


def test_a_module_and_the_environment(shell: Shell) -> None:
    (shell.directory / "more.env").write_text("FROM_FILE=a b\n")
    (shell.directory / "key").write_text("s3cr3t\n")
    reports, out = run(
        shell,
        *("--env", "MODE=fast", "--env-file", "more.env", "--env-from", f"KEY=file:{shell.directory}/key"),
        *("-m", "pkg.train", "--lr", "3e-4"),
    )
    for report in reports:
        assert report["argv"] == [str(shell.directory / "pkg" / "train.py"), "--lr", "3e-4"]
        assert (report["name"], report["package"], report["warm"]) == ("__main__", "pkg", True)
        assert report["cwd"] == report["path"] == str(shell.directory)
        assert report["env"] | {"RANK": ""} == {
            **{"RANK": "", "WORLD_SIZE": "2", "WANDB_PROJECT": "llm", "WANDB_API_KEY": "k-1"},
            **{"MODE": "fast", "FROM_FILE": "a b", "KEY": "s3cr3t"},
        }
    assert "environment of the job: FROM_FILE, MODE, KEY" in out
    assert "as by torchrun:" in out
    assert "WANDB_API_KEY" in out
    assert not any(value in out for value in ("s3cr3t", "k-1", "a b"))
    kept = [path for path in (shell.directory / "tmp").rglob("*") if path.is_file() and path.stat().st_size < 1 << 24]
    assert kept
    assert not [path for path in kept if b"s3cr3t" in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "argv"),
    [
        (["-m", "pkg"], "pkg/__main__.py"),
        (["--run-path", "pkg"], "pkg"),
        (["--no-python", "./tool"], "tool"),
        (["--no-python", sys.executable, "-u", "report.py"], "report.py"),
    ],
)
def test_what_is_python_starts_warm(shell: Shell, arguments: list[str], argv: str) -> None:
    reports, out = run(shell, *arguments, "--lr")
    for report in reports:
        assert report["argv"] == [str(shell.directory / argv), "--lr"]
        assert report["warm"]
    assert "worker template" not in out


def test_another_program_runs_and_says_that_it_starts_cold(shell: Shell) -> None:
    reports, out = run(shell, "--no-python", "./other.sh", "--lr", os.devnull)
    for report in reports:
        assert report["argv"] == ["report.py", "--lr", os.devnull]
        assert not report["warm"]
        assert report["env"]["WANDB_PROJECT"] == "llm"
    assert "other.sh is not a Python program of" in out
