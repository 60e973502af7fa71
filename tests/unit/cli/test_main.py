"""The command line is put together of what is asked for, and of everything when that is not known."""

from __future__ import annotations

from importlib import metadata

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from holdfast.cli import main as subject
from holdfast.cli.main import COMMANDS, application


@pytest.mark.parametrize("name", COMMANDS)
def test_a_subcommand_comes_alone(name: str) -> None:
    assert get_command(application(name)).list_commands(None) == [name]  # type: ignore[attr-defined]


def test_without_a_known_name_all_are_there() -> None:
    assert set(get_command(application("jbs")).list_commands(None)) == set(COMMANDS)  # type: ignore[attr-defined]


def test_version() -> None:
    result = CliRunner().invoke(application("--version"), ["--version"])
    assert (result.exit_code, result.output.strip()) == (0, metadata.version("holdfast-training"))


def test_an_interrupt_while_a_subcommand_is_imported_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subject, "application", interrupted)
    monkeypatch.setattr("holdfast.cli.main.signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        subject.main()
    assert ended.value.code == 130
