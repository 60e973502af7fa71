"""How many nodes one machine is asked to carry: refused before anything is started. The settings of its processes."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdfast.cli.main import application
from holdfast.cli.stack import LocalStack
from holdfast.cli.stack_options import NODES_MAX, StackOptions, inherited
from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.trust.fleet import JOIN_TOKEN_FILE


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--nnodes", "2", "--spares", str(NODES_MAX - 1)], "spares", NODES_MAX - 1),
        (["--spares", "100000"], "spares", 100_000),
        (["--nnodes", str(NODES_MAX + 1), "--spares", "1"], "nodes", NODES_MAX + 1),
    ],
)
def test_a_local_run_of_too_many_nodes_names_what_is_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], field: str, value: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    result = CliRunner().invoke(application("run"), ["run", "--local", *flags, "train.py"])
    assert isinstance(result.exception, InvalidSpec)
    assert str(result.exception).startswith(
        f"{field}: {value} is not valid; expected at most {NODES_MAX} nodes including spares"
    )
    assert not result.output, "nothing was begun"


def test_up_says_how_many_it_can_be_asked_for() -> None:
    result = CliRunner().invoke(application("up"), ["up", "--nodes", str(NODES_MAX + 1)])
    assert result.exit_code == 2
    assert f"less than or equal to {NODES_MAX}" in result.stderr


def test_the_parts_get_what_may_be_broken_on_purpose_and_no_other_setting_of_the_shell() -> None:
    shell = {"PATH": "/bin", "HOLDFAST_REDIS_URL": "redis://other", "HOLDFAST_FAULT_REDIS_KILL": "restarted"}
    assert inherited(shell) == {"PATH": "/bin", "HOLDFAST_FAULT_REDIS_KILL": "restarted"}
    assert inherited({"HOLDFAST_LOG_BYTES_MAX": "0"}) == {"HOLDFAST_LOG_BYTES_MAX": "0"}, "a limit of its nodes"


def test_the_command_for_agents_can_be_pasted_into_a_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStack, "control_endpoint", "127.0.0.1:8471")
    stack, file = LocalStack(StackOptions(directory=tmp_path, nodes=0)), str(tmp_path / "a b" / "it's")
    stack.joining = {JOIN_TOKEN_FILE: file}
    assert shlex.split(stack.agent_command)[-2:] == ["--join-token-file", file]
