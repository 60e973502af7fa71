"""The command line is put together of what is asked for, and of everything when that is not known."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

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


def commands(part: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All groups and commands, with their names."""
    yield names, part
    for name, below in getattr(part, "commands", {}).items():
        yield from commands(below, *names, name)


EVERY = dict(commands(get_command(application())))


@pytest.mark.parametrize("names", EVERY, ids=" ".join)
def test_help_has_a_sentence_whose_lines_the_terminal_breaks(names: tuple[str, ...]) -> None:
    paragraphs = (EVERY[names].help or "").split("\n\n")
    assert all(paragraphs)
    assert [paragraph for paragraph in paragraphs if "\n" in paragraph] == []
    assert "is the only one" not in paragraphs[0]  # a comment of the code


def test_lists_and_details_are_available_as_json() -> None:
    """README says so."""
    readers = {names: each for names, each in EVERY.items() if names and names[-1] in ("list", "show")}
    assert len(readers) > 10
    without = [names for names, each in readers.items() if not any("--json" in option.opts for option in each.params)]
    assert without == []


def test_a_duration_is_not_shown_as_a_number_of_seconds() -> None:
    durations = [
        (names, option)
        for names, each in EVERY.items()
        for option in each.params
        if option.metavar in ("DURATION", "PERIOD") and option.default is not None
    ]
    assert durations
    assert [(names, option.name) for names, option in durations if option.show_default] == []


def shell(*command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, *command], env=os.environ | environment, capture_output=True, timeout=300, check=False
    )


def test_python_dash_m_is_the_command() -> None:
    done = shell("-m", "holdfast", "--version")
    assert (done.returncode, done.stdout.decode().strip()) == (0, metadata.version("holdfast-training"))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_cannot_show_a_character_shows_the_others(encoding: str) -> None:
    """`…` and `→` are not in Latin-1, and `×` is not in ASCII: typing `--help` there ended with a traceback."""
    done = shell("-m", "holdfast", "demo", "--help", PYTHONIOENCODING=encoding, PYTHONUTF8="0", COLUMNS="140")
    assert (done.returncode, done.stderr) == (0, b"")
    assert "run-2, run-3, ?" in done.stdout.decode(encoding)
