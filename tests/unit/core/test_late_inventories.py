"""How long an election waits for inventories that a restarted agent has announced and not delivered."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.findings import FindingKind, Severity
from holdfast.domain.generations import ShardKey, ShardRecord, StoredStep
from holdfast.domain.orders import Inventory
from holdfast.supervisor.core.model.lifecycle import Deferred
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


def in_doubt(store: str = "", store_keep: int = 3) -> Fleet:
    """Of three nodes, only n2 has its shard of the verified step 30; step 40, which is in doubt, is also on n0."""
    spec = job(dp=3)
    fleet = running(replace(spec, checkpoint=replace(spec.checkpoint, store=store, store_keep=store_keep)))
    fleet.train(40)
    held(fleet, "n0", (30, 0), (40, 0), (40, 2))
    held(fleet, "n1", (30, 1), (40, 1))
    held(fleet, "n2", (30, 2), (40, 2))
    fleet.find(FindingKind.NUMERICAL, severity=Severity.WARNING, verified_step="38")
    return fleet


def held(fleet: Fleet, node: str, *shards: tuple[int, int], stored: tuple[StoredStep, ...] = ()) -> None:
    fleet.report(node, Inventory(JOB, tuple(shard(fleet, *each, node) for each in shards), stored))


@pytest.mark.parametrize("announced", [(JOB,), None])
def test_a_state_in_doubt_is_not_restored_before_a_restarted_agent_has_reported_its_shards(
    announced: tuple[str, ...] | None,
) -> None:
    fleet = in_doubt()
    fleet.connect("n2", announced=announced)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert isinstance(fleet.job.doing, Deferred)
    fleet.now += 0.1
    held(fleet, "n2", (30, 2), (40, 2))
    assert restored(fleet) == 30


def test_a_verified_step_that_only_a_node_has_that_is_away_is_waited_for_before_a_state_in_doubt_is_restored() -> None:
    fleet = in_doubt()
    fleet.connect("n3")
    fleet.lose("n2")
    assert isinstance(fleet.job.doing, Deferred)
    fleet.wait(fleet.state.config.scratch_s - 1.0)
    assert isinstance(fleet.job.doing, Deferred)
    fleet.wait(2.0)
    assert restored(fleet) == 40, "the node does not come back, and the run has nothing else to continue from"


def test_without_a_node_that_is_away_a_state_in_doubt_is_restored_at_once() -> None:
    fleet = in_doubt()
    held(fleet, "n2", (40, 2))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert restored(fleet) == 40


def test_a_step_in_the_object_store_that_is_not_in_doubt_is_restored_before_newer_ones_on_the_nodes() -> None:
    fleet = in_doubt("file:///store")
    generation = fleet.job.running
    assert generation is not None
    stored = tuple(StoredStep(generation.attempt, each, generation.mesh, sharded=False) for each in (20, 50))
    for rank, node in enumerate(("n0", "n1", "n2")):
        held(fleet, node, (40, rank), stored=stored)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert restored(fleet) == 20


def test_of_a_store_that_keeps_many_steps_all_are_known_because_the_newest_may_be_in_doubt() -> None:
    fleet = in_doubt("file:///store", store_keep=20)
    generation = fleet.job.running
    assert generation is not None
    stored = tuple(StoredStep(generation.attempt, each, generation.mesh, sharded=False) for each in range(60, 20, -2))
    for rank, node in enumerate(("n0", "n1", "n2")):
        held(fleet, node, (40, rank), stored=stored)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert restored(fleet) == 38
