"""The judges of a soak: each is shown a run in order, and one with a planted fault that it must see."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.soak.judge import (
    ADVANCE_STEPS,
    ALLOWED,
    Progress,
    Sample,
    evicted,
    leaks,
    lost_work,
    repeated,
    restarted,
    untrue,
)
from benchmarks.soak.kinds import KINDS
from benchmarks.soak.truth import Stepped

RANKS = 3


def steps(
    generation: int, first: int, last: int, *, at: float, ranks: int = RANKS, world: int = RANKS
) -> list[Stepped]:
    """Every step from `first` to `last` on `ranks` ranks, ten in a second from `at` on."""
    return [
        Stepped(generation, world, rank, step, at + 0.1 * (step - first))
        for step in range(first, last + 1)
        for rank in range(ranks)
    ]


def progress(*parts: list[Stepped]) -> Progress:
    seen = Progress()
    for part in parts:
        seen.add(part)
    return seen


CLOSED = {
    "id": "i-1",
    "kind": "worker_crash",
    "state": "resolved",
    "action": {"kind": "restart"},
    "fault_at": 1.0,
    "detected_at": 1.0,
    "decided_at": 2.0,
    "prepared_at": None,
    "first_step_at": 3.0,
}

# ---------------------------------------------------------------- dead or alive


def test_a_run_that_steps_has_recovered() -> None:
    seen = progress(steps(1, 1, 50, at=0.0), steps(2, 41, 60, at=10.0))
    assert seen.recovered_at(5.0) == pytest.approx(10.0)
    assert seen.pause_s(5.0, 12.0) == pytest.approx(5.1)  # since the last step before the fault
    assert seen.generations(4.0, 12.0) == [1, 2]
    assert seen.rework_steps(4.9, 12.0) == 10


def test_a_dead_job_has_not() -> None:
    assert progress(steps(1, 1, 50, at=0.0)).recovered_at(5.0) is None
    assert Progress().recovered_at(0.0) is None


def test_a_job_whose_one_rank_is_dead_has_not() -> None:
    seen = progress(steps(1, 1, 50, at=0.0), steps(2, 41, 90, at=10.0, ranks=RANKS - 1))
    assert seen.recovered_at(5.0) is None
    assert seen.pause_s(5.0, 12.0) == pytest.approx(12.0 - 4.9)


def test_a_few_steps_that_were_under_way_are_no_recovery() -> None:
    seen = progress(steps(1, 1, 50, at=0.0), steps(1, 51, 50 + ADVANCE_STEPS - 1, at=5.01))
    assert seen.recovered_at(5.0) is None


def test_a_generation_that_stepped_and_died_again_is_no_recovery() -> None:
    seen = progress(steps(2, 1, 50, at=10.0), steps(3, 41, 42, at=20.0))
    assert seen.recovered_at(5.0) is None


def test_steps_that_never_become_whole_are_dropped() -> None:
    seen = progress(steps(1, 1, 5000, at=0.0, ranks=1))
    assert len(seen._pending) <= 1000
    seen.add(steps(2, 5001, 5010, at=600.0))
    assert seen.last is not None
    assert seen.last.step == 5010


# ---------------------------------------------------------------- stopped, evicted


def test_a_restart_without_a_reason_is_found_and_one_with_a_reason_is_not() -> None:
    assert restarted([3, 4], leaves_alone=True)
    assert not restarted([3], leaves_alone=True)
    assert not restarted([3, 4], leaves_alone=False)


def view(*nodes: str, phase: str = "running", mesh: dict[str, int] | None = None) -> dict[str, Any]:
    return {
        "phase": phase,
        "mesh": mesh or {"dp": len(nodes)},
        "ranks": [{"rank": rank, "node": node} for rank, node in enumerate(nodes)],
    }


def incident(kind: str, *nodes: str, node: str = "") -> dict[str, Any]:
    return {"id": "i-1", "node": node, "action": {"kind": kind, "nodes": list(nodes), "reason": "why"}}


def test_an_incident_that_is_opened_or_carried_out_twice_is_found() -> None:
    assert not repeated([CLOSED], [3, 4], [1])
    assert not repeated([CLOSED], [4], [1])
    assert repeated([CLOSED, CLOSED], [3, 4], [1])
    assert repeated([CLOSED], [3, 4, 5], [1])
    assert not repeated([CLOSED, CLOSED], [3, 4, 5], [1, 1])
    assert not repeated([CLOSED] * 9, [3, 4, 5], [1, None]), "a fault whose incidents are not judged"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"state": "preparing"}, "is preparing"),
        ({"action": None}, "without a decision"),
        ({"decided_at": 0.5}, "decided_at is 0.500 s before detected_at"),
        ({"first_step_at": 1.5}, "first_step_at is 0.500 s before decided_at"),
    ],
)
def test_a_record_that_contradicts_itself_is_found(change: dict[str, Any], says: str) -> None:
    assert not untrue(CLOSED)
    assert says in untrue({**CLOSED, **change})


def test_a_swap_of_a_node_that_nothing_touched_is_an_eviction() -> None:
    before, after = view("a", "b", "c"), view("a", "d", "c")
    assert list(evicted(before, after, [incident("hot_swap", "b")], ["a"])) == ["b"]
    assert list(evicted(before, before, [incident("cordon", node="c")], [])) == ["c"]
    assert list(evicted(before, after, [], ["a"])) == ["b"]  # and when nobody says that it was


def test_a_swap_of_the_node_that_was_struck_is_none() -> None:
    before, after = view("a", "b", "c"), view("a", "d", "c")
    assert not evicted(before, after, [incident("hot_swap", "b")], ["b"])
    assert not evicted(before, before, [incident("restart", "b"), {"id": "i-2", "node": "c", "action": None}], [])


def test_a_node_whose_replica_leaves_with_a_struck_one_is_not_evicted() -> None:
    before, after = view("a", "b", "c", "d", mesh={"dp": 2, "pp": 2}), view("a", "b", mesh={"dp": 1, "pp": 2})
    assert not evicted(before, after, [incident("scale_down", "c")], ["c"])
    assert set(evicted(before, after, [], ["a"])) == {"c", "d"}


def test_a_job_that_is_over_has_evicted_nobody() -> None:
    assert not evicted(view("a", "b"), view(phase="failed"), [], [])


# ---------------------------------------------------------------- lost work


@pytest.mark.parametrize(("kinds", "judged"), [
    (["worker_kill"], True),
    (["node_replaced"], True),  # its peer has everything
    (["worker_kill", "redis_kill"], True),
    (["node_power", "agent_kill"], False),  # perhaps a node and its peer
    (["fleet_replaced"], False),
])  # fmt: skip
def test_a_run_that_falls_back_too_far_is_found_where_something_was_left(kinds: list[str], judged: bool) -> None:
    struck = [KINDS[name] for name in kinds]
    assert bool(lost_work(200, 20, 1.0, struck)) == judged
    assert not lost_work(40, 20, 1.0, struck)
    assert not lost_work(80, 20, 2.5, struck)


# ---------------------------------------------------------------- leaks


def calm(at: float, **changes: float) -> Sample:
    counts = {(what, "x"): 100.0 for what in ALLOWED}
    return Sample(at, counts | {(what, "x"): value for what, value in changes.items()})


def test_what_stays_as_it_is_does_not_leak() -> None:
    assert leaks([calm(float(at)) for at in range(20)]) == {}
    assert leaks([calm(0.0)]) == {}


@pytest.mark.parametrize("what", sorted(ALLOWED))
def test_a_planted_leak_is_found(what: str) -> None:
    more, share = ALLOWED[what]
    each = (more + share * 100.0 + 1.0) / 5.0
    found = leaks([calm(float(at), **{what: 100.0 + each * at}) for at in range(20)])
    assert list(found) == [f"{what} of x"]


def test_a_moment_of_more_is_no_leak() -> None:
    samples = [calm(float(at)) for at in range(20)]
    samples[-1] = calm(19.0, descriptors=100_000.0)
    assert leaks(samples) == {}


def test_what_was_not_there_at_first_and_stays_is_a_leak() -> None:
    samples = [calm(float(at)) for at in range(20)]
    late = [Sample(each.at, {**each.counts, ("processes", "others"): 1.0}) for each in samples[10:]]
    assert leaks([*samples[:10], *late]) == {"processes of others": "0 → 1"}
