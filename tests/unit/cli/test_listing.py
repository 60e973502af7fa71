"""Lists on terminals of any width: nothing is cut, and what one copies is never broken."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from holdfast.cli import checkpoints, explain, incidents, jobs, nodes, tables

AT = 1_795_306_543.68
INCIDENT = {
    "id": "i-1a2009b9af8-2",
    "job": "gpt-two-nodes",
    "kind": "worker_crash",
    "state": "resolved",
    "node": "node-2",
    "rank": 1,
    "action": {"kind": "scale_down"},
    "generation": 12,
    "cause": "Rank 1 on node-2 was killed by SIGKILL after step 59, and it was not the first time that this happened.",
}
ROWS: dict[tuple[str, ...], dict[str, Any]] = {
    incidents.COLUMNS: INCIDENT,
    incidents.ACTION_COLUMNS: {
        "incident": "i-1a2009b9af8-2",
        "job": "gpt-two-nodes",
        "kind": "scale_down",
        "decided_by": "default policy",
        "at": AT,
        "reason": "node-0 is to leave and no spare is free: 1 of 2 replicas go on",
    },
    nodes.COLUMNS: {
        "node": "node-0",
        "state": "cordoned",
        "job": "gpt-two-nodes",
        "zone": "zone-0",
        "pool": "h100",
        "capacity": 8,
        "version": "0.1.0",
        "hostname": "gpu-worker-0017.rack12.example.org",
        "reason": "cordoned by an operator: taken out of service for a new power supply",
    },
    jobs.COLUMNS: {
        "name": "gpt-two-nodes",
        "phase": "preparing",
        "mesh": {"dp": 16, "pp": 8, "tp": 8},
        "generation": 3,
        "step": 123_456,
        "observed_steps": None,
        "loss": 2.34,
        "tokens_per_s": 17_246.9,
        "priority": 10,
        "reason": "generation 3 on 128 nodes, dp 16",
    },
    checkpoints.COLUMNS: {
        "step": 220_000,
        "attempt": 1_795_306_531,
        "mesh": {"dp": 16, "pp": 8, "tp": 8},
        "memory": "1024 of 1024",
        "disk": "1023 of 1024",
        "store": "complete",
        "bytes": "5.7 MB",
        "saved_at": AT,
        "": "newest complete",
    },
    explain.COLUMNS: {
        "id": "node_lost:node-1:5af1c5acf5e24f6887740e6d3beba122::0:1795306547",
        "kind": "node_lost",
        "severity": "warning",
        "node": "node-1",
        "rank": None,
        "at": AT,
        "verdict": "recorded: a finding of severity warning calls for no action",
    },
}


def shown(width: int, columns: tuple[str, ...], row: dict[str, Any]) -> list[str]:
    out = io.StringIO()
    terminal = Console(file=out, width=width, force_terminal=True, color_system=None, highlight=False, emoji=False)
    terminal.print(tables.table([row], columns))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("columns", ROWS)
def test_every_value_is_whole_and_every_line_fits(columns: tuple[str, ...], width: int) -> None:
    row = ROWS[columns]
    lines = shown(width, columns, row)
    assert all(len(line) <= width for line in lines)
    assert len(lines) <= 6
    whole = " ".join(" ".join(lines).split())  # what stands below and prose may go over a line's end
    for column in (column.removesuffix("?") for column in columns):
        value = row["action"]["kind"] if column == "action.kind" else row[column]
        if column == columns[-1]:
            assert value.split()[0] in whole
            assert value.split()[-1] in whole
        elif value is not None:
            assert tables.markup(tables.text(value, column)).plain in whole


def test_what_does_not_fit_beside_stands_below() -> None:
    assert shown(80, incidents.COLUMNS, INCIDENT) == [
        "id               job            kind          state     node    rank  action",
        "    generation · cause",
        "i-1a2009b9af8-2  gpt-two-nodes  worker_crash  resolved  node-2  1     scale_down",
        "    generation 12 · Rank 1 on node-2 was killed by SIGKILL after step 59, and it",
        "    was not the first time that this happened.",
    ]


def test_prose_with_room_enough_stays_in_its_column() -> None:
    assert shown(50, ("id", "cause"), INCIDENT)[1:] == [
        "i-1a2009b9af8-2  Rank 1 on node-2 was killed by",
        "                 SIGKILL after step 59, and it was",
        "                 not the first time that this",
        "                 happened.",
    ]


def test_what_says_nothing_takes_no_line_below() -> None:
    assert len(shown(80, incidents.COLUMNS, INCIDENT | {"generation": None, "cause": ""})) == 3


def test_a_terminal_too_narrow_for_an_id_folds_it() -> None:
    lines = shown(8, ("id", "kind"), INCIDENT)
    assert all(len(line) <= 8 for line in lines)
    assert "".join(lines).replace(" ", "").startswith("idkindi-1a2009b9af8-2")


def test_a_table_among_fields_stands_beside_its_name() -> None:
    out = io.StringIO()
    terminal = Console(file=out, width=60, force_terminal=True, color_system=None, highlight=False, emoji=False)
    ranks = [{"rank": 0, "node": "n0"}, {"rank": 1, "node": "n1"}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "console", terminal)
        tables.show_one({"name": "llm", "reason": "word " * 11 + "end", "ranks": ranks, "spares": 0}, as_json=False)
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "name    llm",
        "reason  word word word word word word word word word word",
        "        word end",
        "ranks   rank  node",
        "        0     n0",
        "        1     n1",
        "spares  0",
    ]
