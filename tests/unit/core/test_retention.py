"""The newest step that every node has is sent to every node, once."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from fleet import JOB, Fleet, job, running
from hypothesis import given
from hypothesis import strategies as st

from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.generations import ShardKey, ShardRecord
from holdfast.domain.orders import Inventory
from holdfast.domain.replication import CommonCheckpoint
from holdfast.supervisor.core.model.job import DOUBT_STEPS_MAX
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.saves.retention import _distinct, newest_everywhere
from holdfast.supervisor.protocol import FindingArrived, JobPhase, StepsCompleted
from holdfast.supervisor.timers import RetentionDue

DP = 3
Held = tuple[tuple[str, ...], set[int]]


class Saving(Fleet):
    def hold(self, rank: int, *steps: int, disk: bool = True, copied: bool = True) -> None:
        """The node of `rank` has its shard of these steps, and the copies of its neighbour's."""
        generation = self.job.running
        assert generation is not None
        ranks = (rank, (rank - 1) % DP) if copied else (rank,)
        records = [
            ShardRecord(ShardKey(generation.attempt, step, each), generation.mesh, tier, 1, str(step), f"n{each}")
            for step in steps
            for each in ranks
            for tier in ("memory", "disk")
            if tier == "memory" or disk
        ]
        self.report(generation.node_of(rank), Inventory(JOB, tuple(records)))

    def reported(self) -> dict[str, int]:
        """What each node heard last; and forget it."""
        told = [(tell.nodes, tell.message) for tell in self.said]
        heard = {
            node: message.step for nodes, message in told if isinstance(message, CommonCheckpoint) for node in nodes
        }
        self.said.clear()
        return heard


def fleet_of_three() -> Saving:
    fleet = running(job(dp=DP), kind=Saving)
    assert isinstance(fleet, Saving)
    return fleet


def test_the_step_that_all_have_on_disk_and_with_a_peer_is_sent_to_all() -> None:
    fleet = fleet_of_three()
    for rank in range(DP):
        fleet.hold(rank, 10)
    assert fleet.reported() == {}, "in a moment: the disks are not done when the memory is"
    fleet.wait(3)
    assert fleet.reported() == {"n0": 10, "n1": 10, "n2": 10}
    fleet.wait(60)
    assert fleet.reported() == {}


def test_one_that_lags_holds_the_word_back() -> None:
    fleet = fleet_of_three()
    for rank in range(DP):
        fleet.hold(rank, 10)
    fleet.wait(3)
    fleet.reported()
    fleet.hold(0, 10, 20)
    fleet.hold(1, 10, 20)
    fleet.hold(2, 10, 20, disk=False)
    fleet.wait(3)
    assert fleet.reported() == {}
    fleet.hold(2, 10, 20)
    for rank in range(DP):
        fleet.hold(rank, 20, 30)
    fleet.wait(3)
    assert fleet.reported() == {"n0": 30, "n1": 30, "n2": 30}


def test_a_step_that_would_not_survive_a_node_is_not_what_all_have() -> None:
    fleet = fleet_of_three()
    for rank in range(DP):
        fleet.hold(rank, 10, copied=rank != 1)
    fleet.wait(3)
    assert fleet.reported() == {}


def test_a_new_attempt_begins_anew_and_the_word_survives_a_change_of_leader() -> None:
    fleet = fleet_of_three()
    for rank in range(DP):
        fleet.hold(rank, 10)
    fleet.wait(3)
    first = fleet.job.checkpoints.saved_by_all
    fleet.reported()
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    assert fleet.job.checkpoints.saved_by_all == first
    for rank in range(DP):
        fleet.hold(rank, 20)
    fleet.wait(3)
    assert fleet.reported() == {"n0": 20, "n1": 20, "n2": 20}
    assert fleet.job.checkpoints.saved_by_all > first


def test_a_step_that_the_next_generation_abandons_is_not_sent() -> None:
    """The node that saved it was lost when the next generation was planned, and comes back before that one starts."""
    fleet = running(job(dp=1), spares=1, saved=10)
    assert fleet.job.running is not None
    attempt, mesh = fleet.job.running.attempt, fleet.job.running.mesh

    def held(step: int) -> ShardRecord:
        return ShardRecord(ShardKey(attempt, step, 0), mesh, "disk", 1, str(step), "n0")

    fleet.inventory("n1", held(10))
    fleet.lose("n0")
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == 10
    fleet.connect("n0")
    fleet.inventory("n0", held(10), held(20))
    fleet.wait(3)
    fleet.expect(JobPhase.PREPARING)
    assert fleet.said == []
    assert fleet.job.checkpoints.saved_by_all <= (attempt, 10)


def test_a_step_of_a_corrupt_state_does_not_replace_the_last_verified_one() -> None:
    fleet = fleet_of_three()
    for rank in range(DP):
        fleet.hold(rank, 10)
    fleet.wait(3)
    assert fleet.reported() == {"n0": 10, "n1": 10, "n2": 10}
    fleet.find(FindingKind.NUMERICAL, verified_step="25")
    for rank in range(DP):
        fleet.hold(rank, 10, 20, 30, 40)
    fleet.wait(3)
    assert fleet.reported() == {"n0": 20, "n1": 20, "n2": 20}
    for rank in range(DP):
        fleet.hold(rank, 20, 40, 50)
    fleet.wait(3)
    assert fleet.reported() == {}, "nodes keep step 20"
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.answer_orders()
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == 20
    fleet.step_all(21)
    for rank in range(DP):
        fleet.hold(rank, 60)
    fleet.wait(3)
    assert fleet.reported() == {"n0": 60, "n1": 60, "n2": 60}


def test_a_job_that_has_ended_says_nothing() -> None:
    fleet = fleet_of_three()
    for rank in range(DP):
        fleet.hold(rank, 10)
    fleet.finish()
    fleet.wait(3)
    assert fleet.reported() == {}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12))
def test_ranks_that_several_nodes_have_are_counted_once(ranges: list[tuple[int, int]]) -> None:
    assert _distinct(ranges) == len({rank for begin, end in ranges for rank in range(begin, end)})


# In which tiers a node holds its own shard, and of which ranks it has a copy on its disk.
HELD = st.tuples(st.sampled_from([(), ("memory",), ("disk",), ("memory", "disk")]), st.sets(st.integers(0, DP - 1)))


@given(st.lists(st.tuples(HELD, HELD), min_size=DP, max_size=DP))
def test_the_newest_step_that_all_have_is_found_whatever_nodes_hold(held: list[tuple[Held, Held]]) -> None:
    fleet = fleet_of_three()
    generation = fleet.job.running
    assert generation is not None
    for rank, both in enumerate(held):
        records = [
            ShardRecord(ShardKey(generation.attempt, step, each), generation.mesh, tier, 1, str(step), f"n{each}")
            for step, (tiers, copies) in zip((10, 20), both, strict=True)
            for tier, each in [*((tier, rank) for tier in tiers), *(("disk", each) for each in copies - {rank})]
        ]
        fleet.report(generation.node_of(rank), Inventory(JOB, tuple(records)))
    everywhere = [
        step
        for at, step in enumerate((10, 20))
        if all("disk" in both[at][0] for both in held)
        and {each for rank, both in enumerate(held) for each in both[at][1] - {rank}} == set(range(DP))
    ]
    assert newest_everywhere(Turn(fleet.state, fleet.now), fleet.job) == max(everywhere, default=0)


def test_a_doubtful_state_does_not_replace_the_last_verified_one_until_the_doubt_is_over() -> None:
    fleet = fleet_of_three()
    for rank in range(DP):
        fleet.hold(rank, 10)
    fleet.wait(3)
    assert fleet.reported() == {"n0": 10, "n1": 10, "n2": 10}
    fleet.step_all(12)
    doubt = fleet.find(FindingKind.NUMERICAL, severity=Severity.WARNING, verified_step="11")
    for rank in range(DP):
        fleet.hold(rank, 10, 12, 14)
    fleet.wait(3)
    assert fleet.reported() == {}, "nodes keep step 10"
    fleet.fold(FindingArrived(fleet.now, over(fleet, doubt)))
    for rank in range(DP):
        fleet.hold(rank, 10, 14, 16)
    fleet.wait(3)
    assert fleet.reported() == {"n0": 16, "n1": 16, "n2": 16}


def over(fleet: Fleet, doubt: Finding) -> Finding:
    return replace(doubt, id=f"{doubt.id}:over", severity=Severity.INFO, verified_step=None, contradicts=doubt.id)


def test_a_crash_while_the_state_is_in_doubt_restores_the_last_verified_step() -> None:
    fleet = fleet_of_three()
    for rank in range(DP):
        fleet.hold(rank, 10, 12)
    fleet.step_all(12)
    fleet.find(FindingKind.NUMERICAL, severity=Severity.WARNING, verified_step="11")
    fleet.find(FindingKind.WORKER_EXCEPTION, "n1", rank=1)
    fleet.answer_orders()
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == 10
    fleet.step_all(13)
    for rank in range(DP):
        fleet.hold(rank, 13)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.answer_orders()
    assert fleet.job.generation.restore.step == 13, "the doubt was about the generation before"


def test_a_spike_does_not_end_a_doubt() -> None:
    fleet = fleet_of_three()
    fleet.step_all(12)
    doubt = fleet.find(FindingKind.NUMERICAL, severity=Severity.WARNING, verified_step="11")
    fleet.find(FindingKind.NUMERICAL, severity=Severity.WARNING)
    assert fleet.job.restore_limit is not None
    fleet.fold(FindingArrived(fleet.now, over(fleet, doubt)))
    assert fleet.job.restore_limit is None


def test_a_doubt_that_is_never_withdrawn_ends() -> None:
    fleet = fleet_of_three()
    fleet.step_all(12)
    fleet.find(FindingKind.NUMERICAL, severity=Severity.WARNING, verified_step="11")
    assert fleet.job.restore_limit is not None
    fleet.fold(StepsCompleted(fleet.now, JOB, fleet.job.number, 11 + DOUBT_STEPS_MAX + 1, fleet.now, 10, 0.1))
    assert fleet.job.restore_limit is None


def test_after_a_lasting_nan_a_loss_that_stays_finite_ends_the_limit() -> None:
    """A loss scaler may skip more steps than make a NaN a lasting one. A crash days later must not restore the step before."""
    fleet = fleet_of_three()
    number = fleet.job.number

    def limited_after(step: int, loss: float | None) -> bool:
        fleet.fold(StepsCompleted(fleet.now, JOB, number, step, fleet.now, 10, 0.1, loss=loss))
        return fleet.job.restore_limit is not None

    fleet.step_all(12)
    fleet.find(FindingKind.NUMERICAL, verified_step="11")
    last = 20 + DOUBT_STEPS_MAX
    for step, loss in ((17, math.inf), (18, 2.0), (19, math.nan), (20, 2.0), (last - 1, 2.0), (last + 5, None)):
        assert limited_after(step, loss), step
    assert not limited_after(last + 6, 2.0)
    for rank in range(DP):
        fleet.hold(rank, 10, 220)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.answer_orders()
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == 220


@pytest.mark.parametrize("nan_first", [True, False])
def test_a_finite_loss_does_not_make_a_corrupt_state_right(nan_first: bool) -> None:
    fleet = fleet_of_three()
    fleet.step_all(12)
    for kind in (FindingKind.NUMERICAL, FindingKind.SILENT_CORRUPTION)[:: 1 if nan_first else -1]:
        fleet.find(kind, verified_step="11" if kind is FindingKind.NUMERICAL else "15", name=kind.value)
    running = fleet.job.running
    assert running is not None
    for step in (20, 21 + DOUBT_STEPS_MAX, 22 + 2 * DOUBT_STEPS_MAX):
        fleet.fold(StepsCompleted(fleet.now, JOB, running.number, step, fleet.now, 10, 0.1, loss=2.0))
    assert fleet.job.running is running, "the change has not started yet"
    assert fleet.job.restore_limit is not None


def test_a_step_is_announced_when_its_state_has_given_a_loss() -> None:
    fleet = fleet_of_three()

    def steps(step: int) -> None:
        fleet.step_all(step)
        fleet.fold(StepsCompleted(fleet.now, JOB, fleet.job.number, step, fleet.now, 10, 1.0, loss=0.5))

    steps(10)
    for rank in range(DP):
        fleet.hold(rank, 10)
    fleet.wait(3)
    assert fleet.reported() == {}, "whether its weights are good is not known yet"
    steps(12)
    fleet.wait(3)
    assert fleet.reported() == {}, "the finding about step 11 may be on its way"
    steps(14)
    fleet.wait(3)
    assert fleet.reported() == {"n0": 10, "n1": 10, "n2": 10}


def test_inventories_are_compared_once_per_save_however_long_its_verification_takes() -> None:
    """At 12,500 nodes each comparison is a tenth of a second of the supervisor."""
    fleet = fleet_of_three()
    fleet.step_all(10)
    fleet.fold(StepsCompleted(fleet.now, JOB, fleet.job.number, 10, fleet.now, 10, 20.0, loss=0.5))
    for rank in range(DP):
        fleet.hold(rank, 10)
    due = fleet.state.timers[RetentionDue(JOB)]
    assert due - fleet.now == pytest.approx(60.0), "the step after it, the next, and the finding"


def test_a_state_in_doubt_is_restored_if_no_verified_step_is_left() -> None:
    fleet = fleet_of_three()
    for rank in range(DP):
        fleet.hold(rank, 12)
    fleet.step_all(12)
    fleet.find(FindingKind.NUMERICAL, severity=Severity.WARNING, verified_step="11")
    fleet.find(FindingKind.WORKER_EXCEPTION, "n1", rank=1)
    fleet.answer_orders()
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == 12, "the run has nothing else to continue from"
