"""What others have written reaches the terminal as text, whatever is in it."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.cli import connection, endings, stack_record
from holdfast.cli.client import Client
from holdfast.cli.connection import NoApi
from holdfast.cli.live import JobDisplay
from holdfast.cli.terminal import Terminal, output_may_be_lost, visible
from holdfast.domain.errors import HoldfastError, InvalidSpec
from holdfast.wire.jobfile import load_job

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\rerror: none\x7f\u202egnp"
SHOWN = r"\x1b]0;owned\x1b[2J\x9b31merror: none\x7f\u202egnp"  # rich leaves out BEL and CR


def test_an_error_that_quotes_an_exception_of_somebody_else(capsys: pytest.CaptureFixture[str]) -> None:
    endings.show_error(HoldfastError(f"rank 3 raised ValueError: {HOSTILE}\nsecond line\tend"))
    said = capsys.readouterr().err
    assert SHOWN in said
    assert not set(said) & set("\x1b\x07\x9b\r\x7f\u202e")
    assert "\nsecond line" in said


@pytest.mark.parametrize("in_terminal", [True, False])
def test_cells_of_tables_and_texts(in_terminal: bool) -> None:
    table = Table("what")
    table.add_row(Text(HOSTILE))
    said = io.StringIO()
    console = Terminal(file=said, force_terminal=in_terminal, width=120, color_system=None)
    console.print(table)
    console.print(HOSTILE, markup=False, soft_wrap=True)
    assert said.getvalue().count("\\x1b]0;owned") == 2
    assert "\x1b]" not in said.getvalue()
    assert "\x9b" not in said.getvalue()


def test_styles_and_live_displays_are_what_they_were() -> None:
    said = io.StringIO()
    console = Terminal(file=said, force_terminal=True, width=40, color_system="standard")
    console.print("[red]red[/]")
    with Live("working", console=console, auto_refresh=False) as live:
        live.update("done", refresh=True)
    assert "\x1b[31mred\x1b[0m" in said.getvalue()
    assert "\x1b[?25l" in said.getvalue(), "the cursor is hidden"


def test_a_worker_may_print_in_colour_and_no_more() -> None:
    said = io.StringIO()
    console = Terminal(file=said, force_terminal=True, width=80, color_system="standard")
    JobDisplay(console).print(f"[rank 0] \x1b[31mloss 2.5\x1b[0m {HOSTILE} 50%")
    assert "\x1b[31mloss 2.5\x1b[0m" in said.getvalue()
    assert "\x1b]0;" not in said.getvalue()
    assert "\x1b[2J" not in said.getvalue()


def test_what_is_no_control_character_is_shown_as_it_is() -> None:
    plain = "Größe 5 µs – 3 × 2 \t 日本\n🙂"
    assert visible(plain) == plain


DEEP = "[" * 200_000


def test_a_server_that_answers_with_brackets_without_end() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/events":
            return httpx.Response(200, text=f"event: x\ndata: {DEEP}\n\n")
        kind = connection.PROBLEM if request.url.path == "/v1/breaker" else "application/json"
        return httpx.Response(500 if kind == connection.PROBLEM else 200, text=DEEP, headers={"content-type": kind})

    with Client("http://127.0.0.1:1", transport=httpx.MockTransport(answer)) as api:
        with pytest.raises(NoApi, match="not JSON"):
            api.job("x")
        with pytest.raises(NoApi, match="not JSON"):
            next(api.events())
        with pytest.raises(HoldfastError):
            api.breaker()


def test_files_of_brackets_without_end(tmp_path: Path) -> None:
    (tmp_path / stack_record.FILE).write_text(DEEP)
    assert stack_record.read(tmp_path) is None


@pytest.mark.parametrize(
    ("key", "value"), [("args", ["a", "\ud800"]), ("env", {"A": "\udfff"}), ("script", "\ud800.py")]
)
def test_a_job_file_with_half_a_character(tmp_path: Path, key: str, value: object) -> None:
    """YAML has room for it, as JSON has."""
    (tmp_path / "train.py").touch()
    job = {"name": "x", "script": "train.py", "nodes": 1, "nproc_per_node": 1} | {key: value}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    with pytest.raises(InvalidSpec, match="expected Unicode text") as refusal:
        load_job(tmp_path / "job.yaml")
    assert key in str(refusal.value)
    str(refusal.value).encode()


class Full(io.TextIOWrapper):
    """Standard output on a disk that is full until there is `room`."""

    def __init__(self, number: int) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)
        self.number, self.room = number, False

    def write(self, text: str) -> int:
        if not self.room:
            raise OSError(self.number, os.strerror(self.number))
        return super().write(text)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_output_that_cannot_be_written_does_not_end_the_command(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Full(number)
    monkeypatch.setattr("sys.stdout", full)
    with output_may_be_lost():
        console = Terminal()
        console.print("lost")
        print("lost", flush=True)
        full.room = True
        console.print("room again")
    assert full.buffer.getvalue() == b"room again\n"  # type: ignore[attr-defined]
    full.room = False
    with pytest.raises(OSError, match=os.strerror(number)):  # of any other command
        Terminal().print("needed")


def test_a_reader_that_has_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", Full(errno.EPIPE))
    with pytest.raises(BrokenPipeError), output_may_be_lost():
        print("nobody reads this")


def test_a_command_without_standard_output_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    with output_may_be_lost():
        print("nowhere")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("with output_may_be_lost():\n    print('a' * 100_000)\n    print('b', flush=True)", 0),
        ("with output_may_be_lost():\n    print('still in the buffer at the end')", 0),
        ("with output_may_be_lost():\n    print('a')\n    sys.exit(93)", 93),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_does_not_change_the_exit_code(body: str, code: int, unbuffered: str) -> None:
    script = f"import sys\nfrom holdfast.cli.terminal import output_may_be_lost\n{body}\n"
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            timeout=300,
        )
    assert (done.returncode, done.stderr) == (code, b"")


@pytest.mark.parametrize("arguments", [["policy", "actions"], ["policy", "show", "--help"]])
def test_a_table_for_which_there_is_no_room_is_an_error_and_no_traceback(arguments: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "holdfast", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
            timeout=300,
        )
    assert (done.returncode, done.stderr) == (1, b"error: no room for the output: the disk is full\n")
