"""Which rank is named, by what its process does and by what the wait-for graph says."""

from __future__ import annotations

import pytest

from holdfast.diagnostics.detectors.localise import RankView, localise
from holdfast.diagnostics.detectors.waiting import Standing, Waiting
from holdfast.domain.signals import Phase


def view(rank: int, **fields: object) -> RankView:
    base: dict[str, object] = {
        "rank": rank,
        "node": f"n{rank}",
        "step": 7,
        "phase": Phase.STEP,
        "state": "S",
        "state_before": "S",
        "cpu": 0.01,
        "window_s": 5.0,
    }
    return RankView(**{**base, **fields})  # type: ignore[arg-type]


ODD: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "gone": ({"state": ""}, {}),
    "zombie": ({"state": "Z"}, {}),
    "stopped": ({"state": "T"}, {}),
    "stopped although behind is another": ({"state": "T", "step": 8}, {}),
    "behind in steps": ({"step": 6}, {}),
    "in the kernel": ({"state": "D", "state_before": "D", "cpu": 0.0}, {}),
    "busy while others sleep": ({"state": "R", "cpu": 0.99}, {}),
    "busy on a machine that is": ({"state": "R", "state_before": "R", "cpu": 0.08}, {"cpu": 0.03}),
    "asleep while others spin": ({"cpu": 0.0}, {"state": "R", "cpu": 0.98}),
    "held interpreter": ({"interpreter": "held", "step": 8}, {"interpreter": "free"}),
    "asleep elsewhere": ({"kernel": "hrtimer_nanosleep", "step": 8}, {"kernel": "futex_do_wait"}),
    "another phase": ({"phase": Phase.CHECKPOINT}, {}),
}


@pytest.mark.parametrize("case", ODD)
@pytest.mark.parametrize("size", [3, 9, 64])
def test_the_odd_one_is_named(case: str, size: int) -> None:
    odd, others = ODD[case]
    for culprit in {0, size // 2, size - 1}:
        views = [view(rank, **(odd if rank == culprit else others)) for rank in range(size)]
        verdict = localise(views, len(views))
        assert (verdict.rank, bool(verdict.reason)) == (culprit, True)


@pytest.mark.parametrize(
    "views",
    [
        [view(0, cpu=0.99), view(1, cpu=0.99), view(2), view(3)],
        [view(0, cpu=0.99), view(1)],
        [view(0, state="R", cpu=0.08), view(1), view(2)],
        [view(0, state="R", state_before="R", cpu=0.03), view(1, cpu=0.02), view(2)],
        [view(rank, state="R", state_before="R", cpu=0.08) for rank in (0, 1)] + [view(2), view(3)],
        [view(0, cpu=0.99, window_s=0.05), view(1, window_s=0.05), view(2, window_s=0.05)],
        [view(rank, state="T") for rank in range(4)],
        [view(rank, state="D", state_before="D") for rank in range(4)],
        [view(0, state="D"), view(1), view(2)],
        [view(0, interpreter="held"), view(1, interpreter="free"), view(2)],
        [view(0, kernel="pipe_read"), view(1, kernel="ep_poll"), view(2, kernel="futex_do_wait")],
    ],
    ids=[
        "two busy",
        "one of two",
        "wants to run for an instant",
        "hardly more than the others",
        "two want to run",
        "no window",
        "all stopped",
        "all in the kernel",
        "D for an instant",
        "one not known",
        "three places",
    ],
)
def test_nobody_is_named_without_evidence(views: list[RankView]) -> None:
    assert localise(views, len(views)).rank is None


def test_progress_narrows_and_the_rest_decides() -> None:
    """Ranks 2 and 5 are behind; of these rank 5 burns CPU, while others ahead do so as well."""
    views = [view(rank, cpu=0.9, step=8) for rank in range(6)]
    views[2], views[5], views[4] = (
        view(2, step=7),
        view(5, step=7, state="D", state_before="D", cpu=0.0),
        view(4, step=7),
    )
    assert localise(views, len(views)).rank == 5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"interpreter": "held"}, "holds the interpreter's lock"),
        ({"state": "D", "state_before": "D", "kernel": "nfs_wait_bit_killable"}, "nfs_wait_bit_killable"),
        ({"state": "R", "cpu": 0.97}, "computes (97% CPU)"),
        ({}, "#9 of group dp"),
    ],
    ids=["held interpreter", "storage", "loop", "nothing more"],
)
def test_what_the_named_ranks_process_does_is_said(fields: dict[str, object], words: str) -> None:
    absent = Waiting(Standing.ABSENT, (1,), "it has not entered all_reduce #9 of group dp")
    verdict = localise([view(0), view(1, **fields), view(2)], 3, absent)
    assert verdict.rank == 1
    assert words in verdict.reason


def test_collectives_outweigh_what_processes_look_like() -> None:
    """Rank 2 spins alone, as a rank inside NCCL does; the others wait for rank 0."""
    views = [view(0), view(1), view(2, state="R", cpu=0.99)]
    assert localise(views, len(views)).rank == 2
    assert localise(views, len(views), Waiting(Standing.ABSENT, (0,), "it has not come")).rank == 0
    assert localise(views, len(views), Waiting(Standing.IN_FLIGHT, (), "the network", (0, 1, 2))).rank is None
    stopped = [view(0), view(1, state="T"), view(2)]
    assert localise(stopped, len(stopped), Waiting(Standing.ABSENT, (0,), "it has not come")).rank == 1


def test_a_rank_that_alone_sends_reports_may_wait_for_the_others() -> None:
    """Seen in a simulated world: the node of rank 0 was lost while the circuit breaker was open."""
    assert localise([view(1)], 2).rank is None
    assert localise([view(1)], 1).rank == 1
    assert localise([view(1, state="T")], 2).rank == 1, "its own state says so"
