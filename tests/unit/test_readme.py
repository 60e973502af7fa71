"""The README is true: its commands parse, its Python compiles and uses what there is, its job and its policy are valid."""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from holdfast.cli.main import application
from holdfast.domain.job import PolicySpec
from holdfast.supervisor.policies.script import try_script
from holdfast.wire.jobfile import load_job

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Block:
    language: str  # empty for an indented block: commands
    text: str


def blocks(text: str) -> list[Block]:
    fenced = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = [Block(match[1], match[2]) for match in fenced.finditer(text)]
    indented = re.findall(r"(?:^    .*\n)+", fenced.sub("", text), re.MULTILINE)
    return found + [Block("", re.sub(r"^    ", "", block, flags=re.MULTILINE)) for block in indented]


BLOCKS = blocks(README)
PYTHON = [block.text for block in BLOCKS if block.language == "python"]
(POLICY,) = (text for text in PYTHON if "def decide" in text)
(JOB,) = (block.text for block in BLOCKS if block.language == "yaml")
LINES = [line for block in BLOCKS if block.language in ("", "sh", "bash") for line in block.text.splitlines()]
COMMANDS = [line for line in LINES if line.startswith("holdfast ")]
TARGETS = [shlex.split(line, comments=True)[1] for line in LINES if line.startswith("make ")]
MENTIONED = sorted(set(re.findall(r"`holdfast ([a-z|]+)(?: ([a-z-]+))?", README)))


def test_there_is_something_to_test() -> None:
    assert len(PYTHON) >= 2
    assert len(COMMANDS) >= 4
    assert {"demo", "test"} <= set(TARGETS)
    assert MENTIONED


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_parses(line: str) -> None:
    """Up to the point where it would do something."""
    arguments = shlex.split(line, comments=True)[1:]
    command = get_command(application())
    context = command.make_context("holdfast", list(arguments))
    while getattr(command, "commands", None):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])  # type: ignore[attr-defined]
        assert command is not None, name
        context = command.make_context(name, rest, parent=context)
    assert not context.args, f"left over: {context.args}"


@pytest.mark.parametrize(("names", "sub"), MENTIONED)
def test_a_command_in_the_text_exists(names: str, sub: str) -> None:
    for name in names.split("|"):
        path = [name, *([sub] if sub in _subcommands(name) else [])]
        result = CliRunner().invoke(application(), [*path, "--help"])
        assert result.exit_code == 0, result.output
    assert not sub or sub in _subcommands(name) or not _subcommands(name), f"holdfast {name} has no {sub}"


def _subcommands(name: str) -> dict[str, object]:
    root = get_command(application())
    return dict(getattr(root.commands[name], "commands", {})) if name in root.commands else {}  # type: ignore[attr-defined]


@pytest.mark.parametrize("target", TARGETS)
def test_a_make_target_exists(target: str) -> None:
    assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("text", PYTHON, ids=lambda text: text.splitlines()[0])
def test_python_compiles_and_imports_what_there_is(text: str) -> None:
    tree = ast.parse(text)
    if "holdfast.train" in text:
        pytest.importorskip("torch")
    for framework in re.findall(r"^from holdfast\.integrations\.(\w+)", text, re.MULTILINE):
        pytest.importorskip(framework, reason=f"{framework} is not installed: tests/frameworks/test_docs.py covers it")
    imports: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports
    names: dict[str, object] = {}
    exec(compile(ast.Module(imports, []), "README.md", "exec"), names)
    for node in ast.walk(tree):  # hf.Run, hf.launch
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hf":
            assert hasattr(names["hf"], node.attr), f"holdfast.train has no {node.attr}"


def test_what_the_training_loop_calls_is_there() -> None:
    pytest.importorskip("torch")
    from holdfast.train import Run

    (text,) = (text for text in PYTHON if "hf.launch" in text)
    called = set(re.findall(r"\brun\.(\w+)", text))
    assert called >= {"restore", "step", "checkpoint", "mesh"}
    assert not [name for name in called if not hasattr(Run, name)]


def test_the_job_is_a_valid_one(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "policy.py").write_text(POLICY)
    spec = load_job(tmp_path / "job.yaml")
    assert spec.mesh.world_size == spec.nodes * spec.nproc_per_node
    assert spec.min_dp < spec.max_dp


@pytest.mark.parametrize("source", ["README", "examples/policy.py"])
def test_the_policy_answers_every_incident(tmp_path: Path, source: str) -> None:
    script = tmp_path / "policy.py"
    script.write_text(POLICY if source == "README" else (ROOT / source).read_text())
    assert [trial for trial in try_script(PolicySpec(str(script)), deadline_s=30.0) if trial.problem] == []


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(((?!https?:)[^)#]+)\)", README))))
def test_a_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists(), f"README links to {link}, which is not there"
