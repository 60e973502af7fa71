"""Lists and single things as tables and as JSON."""

from __future__ import annotations

import io
import json
import time
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from holdfast.cli import incidents, jobs, nodes, tables
from holdfast.cli.client import Client
from holdfast.cli.main import application
from holdfast.domain.errors import InvalidSpec

NASTY = "[/] job.yaml:100: [red] :smile:"


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    out = io.StringIO()
    monkeypatch.setattr(tables, "console", Console(file=out, width=140, highlight=False, emoji=False))
    return out


@pytest.mark.parametrize(
    ("value", "name", "shown"),
    [
        (None, "", "–"),
        ("", "", "–"),
        ([], "", "–"),
        ({}, "mesh", "–"),
        (0, "rank", "0"),
        (False, "connected", "no"),
        (1.005, "wall_s", "1.00"),
        (2.34061, "loss", "2.341"),
        (0.00012345, "loss", "0.0001234"),
        (10.8249, "loss", "10.82"),
        (float("nan"), "loss", "nan"),
        ({"dp": 3, "pp": 2}, "mesh", "dp 3 × pp 2"),
        (["n1", "n2"], "nodes", "n1, n2"),
        (NASTY, "reason", NASTY),
        ([NASTY], "findings", NASTY),
        ({"a": NASTY}, "evidence", f"a {NASTY}"),
        (
            {"elastic": {"min_dp": 1, "max_dp": None}, "mesh": {"dp": 2}},
            "spec",
            "elastic min_dp 1, max_dp –\nmesh dp 2",
        ),
        ("lost", "state", "lost"),
    ],
)
def test_cells(screen: io.StringIO, value: Any, name: str, shown: str) -> None:
    tables.console.print(tables.text(value, name))
    assert screen.getvalue().rstrip("\n") == shown


@pytest.mark.parametrize("name", ["at", "fault_at", "submitted_at"])
def test_moments_are_local_time(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        assert tables.text(1_700_000_000.257, name) == "2023-11-14 22:13:20.25"
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("columns", [jobs.COLUMNS, nodes.COLUMNS, incidents.COLUMNS, incidents.ACTION_COLUMNS])
def test_a_list(screen: io.StringIO, columns: tuple[str, ...]) -> None:
    tables.console.width = 1000
    columns = tuple(column.removesuffix("?") for column in columns)
    row = dict.fromkeys(columns, NASTY) | {"at": 1_700_000_000.0, "mesh": {"dp": 2}, "action": None}
    tables.show_list([row], columns, as_json=False, empty="none")
    header, line = screen.getvalue().splitlines()[:2]
    assert header.split() == " ".join(column.split(".")[0] for column in columns).replace("_", " ").split()
    assert line.strip()


def test_nested_columns_are_reached_and_missing_ones_are_a_dash(screen: io.StringIO) -> None:
    rows: list[dict[str, Any]] = [{"action": {"kind": "restart"}}, {"action": None}, {}]
    tables.show_list(rows, ("action.kind",), as_json=False, empty="none")
    assert screen.getvalue().split() == ["action", "restart", "–", "–"]


def test_on_a_pipe_a_row_is_one_line_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    cause = "word " * 100 + "end"
    tables.console.print(tables.table([{"id": "i-1", "cause": cause}, {"id": "i-22", "cause": ""}], ("id", "cause")))
    assert capsys.readouterr().out.splitlines() == ["id    cause", f"i-1   {cause}", "i-22  –"]


def test_an_empty_list_says_what_to_do(screen: io.StringIO) -> None:
    tables.show_list([], ("name",), as_json=False, empty="no jobs; start one with `holdfast run`")
    assert screen.getvalue() == "no jobs; start one with `holdfast run`\n"


def test_json_is_json_also_when_it_is_empty_or_nasty(capsys: pytest.CaptureFixture[str]) -> None:
    for rows in ([], [{"reason": NASTY, "at": 1.5, "mesh": {"dp": 1}}]):
        tables.show_list(rows, ("reason",), as_json=True, empty="none")
        assert json.loads(capsys.readouterr().out) == rows
    tables.show_one({"reason": NASTY}, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"reason": NASTY}


def test_one_thing_with_a_table_in_it(screen: io.StringIO) -> None:
    ranks = [{"rank": 0, "node": "n0", "pid": None}, {"rank": 1, "node": "n1", "pid": 7}]
    tables.show_one({"name": "llm", "ranks": ranks, "spec": {"script": "/x", "mesh": {"dp": 2}}}, as_json=False)
    text = screen.getvalue()
    assert "n1" in text
    assert "mesh dp 2" in text
    assert "script /x" in text


def test_a_rate_of_flops_that_nobody_reports_is_not_zero(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for rate, shown in ((0.0, "–"), (4.2e12, "4200000000000.00")):
        monkeypatch.setattr(Client, "goodput", lambda *_, rate=rate: {"fault_free_flops_per_s": rate})
        jobs.goodput("llm", "http://127.0.0.1:1")
        assert screen.getvalue().split()[-1] == shown
        jobs.goodput("llm", "http://127.0.0.1:1", as_json=True)
        assert json.loads(capsys.readouterr().out) == {"fault_free_flops_per_s": rate}


@pytest.mark.parametrize(
    ("addresses", "code"),
    [
        ([], 1),
        ([{"address": "1: https", "sent": True, "problem": ""}], 0),
        (
            [
                {"address": "1: https", "sent": True, "problem": ""},
                {"address": "2: x", "sent": False, "problem": "503"},
            ],
            1,
        ),
    ],
)
def test_a_test_alert_that_somebody_does_not_get_is_a_failure(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch, addresses: list[dict[str, Any]], code: int
) -> None:
    monkeypatch.setattr(Client, "test_alerts", lambda _: addresses)
    result = CliRunner().invoke(application("notify"), ["notify", "test", "--api", "http://127.0.0.1:1"])
    assert result.exit_code == code
    assert addresses or "HOLDFAST_ALERT_URLS" in screen.getvalue()


def test_watching_on_a_pipe_prints_what_changes(screen: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    views = iter([[{"name": "a"}], [{"name": "a"}], [{"name": "b"}]])

    def rows() -> list[dict[str, str]]:
        try:
            return next(views)
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr(tables, "WATCH_S", 0.0)
    tables.watch(rows, ("name",))
    assert screen.getvalue().split() == ["name", "a", "name", "b"]


def test_watching_says_that_there_are_more_rows_than_it_shows(
    screen: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    for count in (tables.WATCHED_ROWS_MAX, tables.WATCHED_ROWS_MAX + 1):
        tables.watch(lambda count=count: iter({"name": f"n{n}"} for n in range(count)), ("name",))  # type: ignore[misc]
    assert screen.getvalue().count(f"the first {tables.WATCHED_ROWS_MAX} of more") == 1
    assert screen.getvalue().count("n199") == 2
    assert "n200" not in screen.getvalue()


ROWS: list[dict[str, Any]] = [
    {"node": "n1", "state": "lost", "job": "gpt", "connected": False},
    {"node": "n2", "state": "active", "job": "gpt", "connected": True},
    {"node": "n3", "state": "lost", "job": None, "connected": False},
]


@pytest.mark.parametrize(
    ("where", "left"),
    [
        ([], ["n1", "n2", "n3"]),
        (["state=lost"], ["n1", "n3"]),
        (["state=lost", "job=gpt"], ["n1"]),
        (["job="], ["n3"]),
        (["connected=yes"], ["n2"]),
        (["state=los"], []),
    ],
)
def test_rows_are_selected_by_what_lists_show(where: list[str], left: list[str]) -> None:
    assert [row["node"] for row in tables.selected(ROWS, where)] == left


@pytest.mark.parametrize("condition", ["lost", "colour=red", "=lost", ""])
def test_a_condition_that_names_no_field_is_an_error(condition: str) -> None:
    with pytest.raises(InvalidSpec, match=r"--where: .*FIELD=VALUE; fields: node, state, job, connected"):
        list(tables.selected(ROWS, [condition]))


def test_a_column_that_no_row_uses_is_left_out(screen: io.StringIO) -> None:
    rows = [{"node": "n1", "pool": "", "zone": "a"}, {"node": "n2", "pool": "", "zone": "b"}]
    tables.show_list(rows, ("node", "pool?", "zone"), False, "")
    assert "pool" not in screen.getvalue()
    tables.show_list([*rows, {"node": "n3", "pool": "h100", "zone": "b"}], ("node", "pool?", "zone"), False, "")
    header, *_, last = screen.getvalue().strip().splitlines()[-4:]
    assert (header.split(), last.split()) == (["node", "pool", "zone"], ["n3", "h100", "b"])
