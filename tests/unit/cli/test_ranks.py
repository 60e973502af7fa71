"""`holdfast jobs ranks`: the order of the ranks, and what the table leaves out."""

from __future__ import annotations

from typing import Any

from holdfast.cli.ranks import By, in_order, notes, rows_of

COLUMNS = {
    "generation": 3,
    "nodes": ["n1", "n2"],
    "states": ["alive", "starting", "absent", "unreported", "lost", "suspect"],
    "node": [0, 0, 1, 1],
    "state": [0, 5, 0, 4],
}


def measured(**changes: Any) -> dict[str, Any]:
    return {
        "generation": 3,
        "nodes": 2,
        "answered": 2,
        "step_s": [10.0, 10.0, 10.1, None],
        "wait_s": [2.0, 0.5, None, None],
        "temperature_c": [60.0, 61.0, 88.0, None],
    } | changes


def order(by: By, **changes: Any) -> list[int]:
    return [row["rank"] for row in in_order(rows_of(COLUMNS, measured(**changes)), by)]


def test_the_rank_that_waits_least_is_the_slowest_and_unknown_ranks_come_last() -> None:
    assert order(By.OWN) == [1, 0, 2, 3]
    assert order(By.STEP) == [2, 0, 1, 3]
    assert order(By.TEMPERATURE) == [2, 1, 0, 3]
    assert order(By.STATE) == [3, 1, 0, 2]


def test_measurements_of_another_generation_do_not_count() -> None:
    rows = rows_of(COLUMNS, measured(generation=2))
    assert all(row["step_s"] is None for row in rows)
    assert "no step time is known" in notes(rows, rows, measured(), By.STEP)[-1]


def test_what_is_left_out_is_said() -> None:
    rows = rows_of(COLUMNS, measured())
    left_out, silent = notes(rows, rows[:1], measured(answered=1), By.OWN)
    assert left_out == "3 more ranks; --limit 0 shows all"
    assert silent.startswith("1 of 2 nodes have answered")
    assert notes(rows, rows, measured(), By.OWN) == []
