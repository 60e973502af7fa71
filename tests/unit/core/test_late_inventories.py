"""How long an election waits for inventories that a restarted agent has announced and not delivered."""

from __future__ import annotations

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.findings import FindingKind
from holdfast.domain.generations import ShardKey, ShardRecord
from holdfast.supervisor.core.lifecycle import Deferred
from holdfast.supervisor.protocol import JobPhase

STEP_S = 0.1  # of `Fleet.train`


def saved_by_two_of_three(at_step: int = 30, *, trained: int = 31, interval: int = 10) -> Fleet:
    """Step 20 is known to be complete. Of a newer step, n0 and n1 have reported their shards, and n2 has not."""
    fleet = running(job(dp=3, interval=interval), saved=20)
    fleet.train(trained)
    for rank, node in enumerate(("n0", "n1")):
        fleet.inventory(node, shard(fleet, at_step, rank, node))
    return fleet


def shard(fleet: Fleet, at_step: int, rank: int, node: str) -> ShardRecord:
    generation = fleet.job.running
    assert generation is not None
    return ShardRecord(ShardKey(generation.attempt, at_step, rank), generation.mesh, "disk", 1, f"{at_step}@0", node)


def fault(fleet: Fleet, *announced: str) -> None:
    """The agent of n2 starts again, and a rank of n1 fails."""
    fleet.connect("n2", announced=announced)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)


def restored(fleet: Fleet) -> int:
    fleet.expect(JobPhase.PREPARING)
    assert fleet.job.generation is not None
    return fleet.job.generation.restore.step


def test_a_step_that_only_an_announced_inventory_completes_is_waited_for() -> None:
    fleet = saved_by_two_of_three()
    fault(fleet, JOB)
    assert isinstance(fleet.job.doing, Deferred)
    assert "n2 just connected, and may hold newer steps than 20" in fleet.job.reason
    fleet.now += 0.1
    fleet.inventory("n2", shard(fleet, 30, 2, "n2"))
    assert restored(fleet) == 30


def test_the_wait_is_no_longer_than_the_steps_that_it_could_save() -> None:
    fleet = saved_by_two_of_three()
    fault(fleet, JOB)
    fleet.wait(10 * STEP_S - 0.05)
    assert isinstance(fleet.job.doing, Deferred)
    fleet.wait(0.1)
    assert restored(fleet) == 20


def test_the_wait_is_no_longer_than_for_any_inventory() -> None:
    fleet = saved_by_two_of_three(60, trained=61)
    fault(fleet, JOB)
    fleet.wait(fleet.state.config.inventory_s - 0.1)
    assert isinstance(fleet.job.doing, Deferred)
    fleet.wait(0.2)
    assert restored(fleet) == 20


def test_shards_of_another_job_are_not_waited_for() -> None:
    fleet = saved_by_two_of_three()
    fault(fleet, "other")
    assert restored(fleet) == 20


@pytest.mark.parametrize("trained", [21, 29])
def test_nothing_is_waited_for_if_no_save_was_due_since(trained: int) -> None:
    fleet = running(job(dp=3), saved=20)
    fleet.train(trained)
    fault(fleet, JOB)
    assert restored(fleet) == 20


def test_a_save_that_was_due_may_be_complete_although_nobody_has_reported_it() -> None:
    fleet = running(job(dp=3), saved=20)
    fleet.train(31)
    fault(fleet, JOB)
    assert isinstance(fleet.job.doing, Deferred)


def test_a_newer_step_that_must_not_be_restored_is_not_waited_for() -> None:
    fleet = running(job(dp=3), saved=20)
    fleet.train(31)
    fleet.connect("n2", announced=(JOB,))
    fleet.find(FindingKind.SILENT_CORRUPTION, verified_step="25")
    assert restored(fleet) == 20
