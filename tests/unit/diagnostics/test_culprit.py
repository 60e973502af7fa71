"""Among errors of communication nobody is named without proof: not the first by the clock, not before all witnesses came."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from diagnosing import COLLECTIVE, T0, Fleet

from holdfast.diagnostics.engine import Engine
from holdfast.domain.findings import FindingKind
from holdfast.domain.signals import WorkerError, WorkerExited


def restarted(fleet: Fleet) -> None:
    """Diagnostics starts anew; nobody has come back yet."""
    fresh = Fleet(nodes=fleet.nodes)
    fleet.engine = fresh.engine
    assert isinstance(fleet.engine, Engine)


def comes_back(fleet: Fleet, *nodes: str) -> None:
    for node in nodes:
        fleet.connects(node)
        fleet.fold(fleet.started(node))


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet(nodes=4)
    fleet.start()
    fleet.run(until=5.0)
    fleet.training = False
    return fleet


# ------------------------------------------------------------------ after a restart of diagnostics


def test_the_agent_with_the_cause_is_waited_for(fleet: Fleet) -> None:
    """Rank 3 was killed while diagnostics was away, and its agent takes two seconds to come back."""
    restarted(fleet)
    comes_back(fleet, "n0", "n1", "n2")
    for rank in (0, 1, 2):
        fleet.exits(rank, at=5.01, error=COLLECTIVE)
    fleet.run(until=7.0)
    assert fleet.found == []
    comes_back(fleet, "n3")
    fleet.exits(3, at=5.0, signal=9)
    fleet.run(until=20.0)
    assert (fleet.only().kind, fleet.only().rank) == (FindingKind.WORKER_CRASH, 3)


def test_nobody_is_suspected_when_the_agent_with_the_cause_does_not_come(fleet: Fleet) -> None:
    restarted(fleet)
    comes_back(fleet, "n0", "n1", "n2")
    for rank in (0, 1, 2):
        fleet.exits(rank, at=5.01, error=COLLECTIVE)
    fleet.run(until=20.0)
    found = fleet.only()
    assert (found.kind, found.node, found.rank) == (FindingKind.WORKER_EXCEPTION, "", None)
    assert found.at <= T0 + 10.5


def test_when_every_rank_is_spoken_for_nothing_is_waited_for(fleet: Fleet) -> None:
    restarted(fleet)
    comes_back(fleet, *fleet.names)
    fleet.exits(0, error=COLLECTIVE)
    fleet.run(until=5.5)
    assert fleet.only().node == ""


# ------------------------------------------------------------------ what was first


def test_causes_are_ordered_by_a_step_that_all_have_finished_and_not_by_clocks(fleet: Fleet) -> None:
    """Rank 1 failed 0.1 s after step 9, rank 2 0.9 s after it; the clock of rank 1's node is an hour ahead."""
    fleet.exits(2, at=5.8, signal=11, step_ends=(T0 + 4.9,), step=9)
    fleet.exits(1, at=3605.0, signal=9, step_ends=(T0 + 3604.9,), step=9)
    assert [finding.rank for finding in fleet.found] == [2, 1]
    assert fleet.found[1].evidence["supersedes"] == fleet.found[0].id


def test_a_rank_that_was_a_step_further_is_measured_from_the_step_before(fleet: Fleet) -> None:
    fleet.exits(2, at=5.8, signal=11, step_ends=(T0 + 5.4, T0 + 4.9), step=10)
    fleet.exits(1, at=-3594.0, signal=9, step_ends=(T0 - 3594.2,), step=9)
    assert [finding.rank for finding in fleet.found] == [2, 1]
    fleet.exits(3, at=5.0, signal=9, step_ends=(T0 + 4.5,), step=9)  # half a second after the step: later
    assert len(fleet.found) == 2


def of_node(exit_: WorkerExited, node: str) -> WorkerExited:
    return replace(exit_, node=node)


@pytest.mark.parametrize("jump_s", [0.0, 3600.0, -3600.0])
def test_a_clock_that_jumps_between_two_exits_of_a_node_changes_no_culprit(fleet: Fleet, jump_s: float) -> None:
    """Rank 1 failed 0.4 s after rank 2, by the clock that nobody sets, and its signal comes first."""
    later = replace(fleet.exit_of(1, at=5.4 + jump_s, signal=9), uptime_s=900.4)
    first = replace(fleet.exit_of(2, at=5.0, signal=11), uptime_s=900.0)
    fleet.fold(of_node(later, "n1"))
    fleet.fold(of_node(first, "n1"))
    assert [finding.rank for finding in fleet.found] == [1, 2]
    assert fleet.found[1].evidence["supersedes"] == fleet.found[0].id
    fleet.fold(of_node(replace(fleet.exit_of(3, at=4.0 + jump_s, signal=9), uptime_s=901.0), "n1"))
    assert len(fleet.found) == 2


@pytest.mark.parametrize("jump_s", [0.0, 3600.0, -3600.0])
def test_a_clock_that_jumps_between_a_step_and_an_exit_changes_no_culprit(fleet: Fleet, jump_s: float) -> None:
    """Rank 2 failed 0.9 s after step 9; rank 1, on a node of which the clock was set meanwhile, 0.1 s after it."""
    fleet.fold(
        replace(
            fleet.exit_of(2, at=5.8, signal=11, step=9),
            step_ends=(T0 + 4.9,),
            uptime_s=77.9,
            step_end_uptimes_s=(77.0,),
        )
    )
    early = replace(
        fleet.exit_of(1, at=5.0 + jump_s, signal=9, step=9),
        step_ends=(T0 + 4.9,),
        uptime_s=500_000.1,
        step_end_uptimes_s=(500_000.0,),
    )
    fleet.fold(early)
    assert [finding.rank for finding in fleet.found] == [2, 1]
    late = replace(early, rank=3, node="n3", step_end_uptimes_s=(499_998.0,))
    fleet.fold(late)
    assert len(fleet.found) == 2


def test_an_exceptions_own_time_counts_by_that_clock_too(fleet: Fleet) -> None:
    """Rank 1's process ended first; rank 2 had raised before that, and took a second to end."""
    raised = WorkerError("ValueError", "bad batch", ("/t/train.py:1 <module>",), at=T0 + 4.0, uptime_s=99.0)
    other = replace(raised, message="another one", at=T0 + 3604.5, uptime_s=99.5)
    fleet.fold(of_node(replace(fleet.exit_of(1, at=3604.6, error=other), uptime_s=99.6), "n1"))
    fleet.fold(of_node(replace(fleet.exit_of(2, at=5.0, error=raised), uptime_s=100.0), "n1"))
    assert [finding.rank for finding in fleet.found] == [1, 2]


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_the_first_of_several_communication_errors_is_found_by_that_clock(fleet: Fleet, jump_s: float) -> None:
    for rank, at, uptime_s in ((1, 5.2 + jump_s, 300.2), (2, 5.0, 300.0), (0, 5.3 + jump_s, 300.3)):
        error = replace(COLLECTIVE, at=T0 + at, uptime_s=uptime_s)
        fleet.fold(of_node(replace(fleet.exit_of(rank, at=at + 0.1, error=error), uptime_s=uptime_s + 0.1), "n1"))
    fleet.run(until=10.0)
    assert fleet.only().evidence["first"] == "rank 2 on n1"


@pytest.mark.parametrize("uptime_s", [math.nan, math.inf, -5.0])
def test_an_uptime_that_is_none_is_not_used(fleet: Fleet, uptime_s: float) -> None:
    fleet.fold(of_node(replace(fleet.exit_of(1, at=5.4, signal=9), uptime_s=uptime_s), "n1"))
    fleet.fold(of_node(replace(fleet.exit_of(2, at=5.0, signal=11), uptime_s=uptime_s), "n1"))
    assert [finding.rank for finding in fleet.found] == [1, 2]


# ------------------------------------------------------------------ out of step


def broken(*calls: tuple[int, str]) -> WorkerError:
    return replace(
        COLLECTIVE, call_group=("0",) * len(calls), call_seq=tuple(s for s, _ in calls), call=tuple(c for _, c in calls)
    )


SUM, OTHER = "all_reduce ['Float'] [[4]]", "all_reduce ['Float'] [[9]]"


@pytest.mark.parametrize("culprit", [0, 2, 3])
def test_a_rank_that_skipped_a_collective_is_named_and_not_its_neighbour(fleet: Fleet, culprit: int) -> None:
    for rank in ((culprit + 1) % 4, (culprit + 2) % 4, culprit, (culprit + 3) % 4):
        fleet.exits(rank, at=5.0 + fleet.now / 1e3, error=broken((7, SUM), *([] if rank == culprit else [(8, SUM)])))
        fleet.run(until=fleet.now + 0.2)
    fleet.run(until=10.0)
    assert (fleet.only().rank, fleet.only().node) == (culprit, f"n{culprit}")
    assert "7 collectives" in fleet.only().summary
    assert fleet.only().at <= T0 + 7.5


def test_a_rank_that_calls_something_else_at_the_same_number_is_named(fleet: Fleet) -> None:
    for rank in range(4):
        fleet.exits(rank, error=broken((7, SUM), (8, OTHER if rank == 2 else SUM)))
    fleet.run(until=10.0)
    assert (fleet.only().rank, fleet.only().confidence) == (2, 0.8)


@pytest.mark.parametrize(
    "errors",
    [
        [broken((8, SUM)), broken((8, SUM)), broken((7, SUM)), broken((7, SUM))],
        [broken((8, SUM)), broken((7, SUM)), COLLECTIVE, COLLECTIVE],
        [broken((8, f"all_to_all [[{n}]]")) for n in range(4)],
        [broken((8, SUM))] * 4,
    ],
    ids=["no majority", "two", "sizes may differ", "all alike"],
)
def test_without_a_majority_nobody_is_named(fleet: Fleet, errors: list[WorkerError]) -> None:
    for rank, error in enumerate(errors):
        fleet.exits(rank, error=error)
    fleet.run(until=10.0)
    assert fleet.only().rank is None


def test_a_rank_that_left_early_with_code_0_is_named(fleet: Fleet) -> None:
    fleet.exits(2, exit_code=0)
    for rank in (0, 1, 3):
        fleet.exits(rank, error=COLLECTIVE)
    fleet.run(until=10.0)
    assert fleet.only().rank == 2
    assert "ended with exit code 0" in fleet.only().summary
