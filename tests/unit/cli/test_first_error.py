"""`holdfast logs --first-error`: which of several exceptions counts, and what is said about nodes that were not reached."""

from __future__ import annotations

from typing import Any

from holdfast.cli.first_error import Raised, first_error, headline, nothing
from holdfast.domain.signals import WorkerError


def shown_error(*errors: tuple[int, float | None], **changes: Any) -> dict[str, Any]:
    listed: list[dict[str, Any]] = [
        {"rank": rank, "node": f"n{rank}", "at": at, "type": "ValueError", "message": f"text {rank}", "frames": []}
        for rank, at in errors
    ]
    return {
        "generation": 4 if errors else 0, "nodes": 3, "asked": 3, "answered": 3, "decided_by": "time", "incident": "",
        "errors": listed,
    } | changes  # fmt: skip


def here(rank: int, at: float, generation: int = 4) -> Raised:
    return Raised(generation, rank, f"n{rank}", WorkerError("OSError", f"here {rank}", (), at))


def test_the_incident_decides_and_the_others_follow_by_time() -> None:
    found = first_error(
        shown_error((2, 9.0), (0, 5.0), decided_by="incident", incident="inc-1"), [here(1, 4.0), here(0, 5.0)]
    )
    assert [each.rank for each in found.raised] == [2, 1, 0]
    assert headline(found).endswith("in generation 4; 2 other ranks raised as well (by incident inc-1)")


def test_without_an_incident_the_earliest_counts_and_one_without_a_time_comes_last() -> None:
    found = first_error(shown_error((2, None), (0, 5.0)), [here(1, 4.0)])
    assert [each.rank for each in found.raised] == [1, 0, 2]
    assert "time of the exceptions" in headline(found)


def test_the_newest_generation_counts_wherever_it_was_found() -> None:
    found = first_error(shown_error((2, 9.0), decided_by="incident", incident="inc-1"), [here(1, 40.0, generation=5)])
    assert [(each.generation, each.rank) for each in found.raised] == [(5, 1)]
    assert found.reason == "time of the exceptions", "the incident is about generation 4"


def test_files_of_this_machine_count_without_a_supervisor() -> None:
    assert [each.rank for each in first_error(None, [here(1, 4.0)]).raised] == [1]
    assert first_error(None, []).raised == []


def test_nodes_that_were_not_reached_are_named() -> None:
    silent = first_error(shown_error(answered=1), [])
    assert nothing(silent, "llm", 0).endswith(
        "1 of 3 nodes have answered: the agents of the others are not connected, or not in time"
    )
    bound = first_error(shown_error(nodes=600, asked=512, answered=512), [])
    assert nothing(bound, "llm", 7).startswith("no rank of generation 7 of llm has left an exception")
    assert "512 of 600 nodes were asked" in nothing(bound, "llm", 7)
    assert not first_error(shown_error((1, 2.0)), []).silent
