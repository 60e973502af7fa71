"""A checkpoint on nodes: which nodes hold the shard of each rank, also of one that is incomplete."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from holdfast.cli.node_checkpoints import described
from holdfast.domain.errors import NotFound


def row(step: int, attempt: int, ranks: int, *, newest: bool = False) -> dict[str, Any]:
    tiers = {"memory": 0, "disk": ranks, "store": False}
    whole = ranks == 2
    mesh = {"dp": 2}
    return {"step": step, "attempt": attempt, "mesh": mesh, "tiers": tiers, "complete": whole, "newest": newest}


class Control:
    """Steps 10 (of two attempts) and 20; of step 30 only rank 0 was saved, and of 40 nothing is left."""

    def checkpoints(self, job: str) -> Iterator[dict[str, Any]]:
        yield from (row(40, 2, 0), row(30, 2, 1), row(20, 2, 2, newest=True), row(10, 2, 2), row(10, 1, 2))

    def checkpoint_holders(self, job: str, attempt: int, step: int) -> dict[int, list[str]]:
        return {0: ["a"]} if step == 30 else {0: ["a", "b"], 1: [f"of-attempt-{attempt}"]}


def shown(step: int | None = None, attempt: int | None = None) -> dict[str, Any]:
    return described(Control(), "llm", step, attempt)  # type: ignore[arg-type]


def test_the_one_that_a_restart_would_restore_is_shown() -> None:
    assert shown() == {
        "job": "llm",
        "step": 20,
        "attempt": 2,
        "mesh": {"dp": 2},
        "complete": True,
        "ranks": [{"rank": 0, "dp": 0, "nodes": ["a", "b"]}, {"rank": 1, "dp": 1, "nodes": ["of-attempt-2"]}],
    }


def test_a_step_of_several_attempts_is_the_newest_or_the_named_one() -> None:
    assert shown(10)["attempt"] == 2
    assert shown(10, 1)["ranks"][1]["nodes"] == ["of-attempt-1"]


def test_an_incomplete_one_shows_which_rank_has_not_saved() -> None:
    incomplete = shown(30)
    assert not incomplete["complete"]
    assert [rank["nodes"] for rank in incomplete["ranks"]] == [["a"], []]


@pytest.mark.parametrize(("step", "attempt"), [(40, None), (50, None), (20, 1)])
def test_one_that_is_not_there_is_not_shown(step: int, attempt: int | None) -> None:
    with pytest.raises(NotFound, match=r"complete ones: 20 \(attempt 2\), 10"):
        shown(step, attempt)
