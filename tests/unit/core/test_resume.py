"""A job that starts from another job's checkpoint in an object store, and never from anything else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet import JOB, Fleet, job

from holdfast.domain.findings import FindingKind
from holdfast.domain.generations import OBJECT_STORE, ShardKey, ShardSource, StoredStep
from holdfast.domain.job import ResumeSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import OrderDone, Prepare
from holdfast.supervisor.protocol import JobPhase, JobSubmitted

ATTEMPT = 700
THERE = ResumeSpec("gs://bucket/prefix", "old")


def resumed(dp: int = 2, *, saved_dp: int = 2, sharded: bool = False, attempt: int = ATTEMPT) -> Fleet:
    fleet = Fleet(3)
    spec = replace(job(dp=dp), resume=THERE)
    stored = StoredStep(attempt, 1200, Mesh.of({"dp": saved_dp}), sharded)
    fleet.fold(JobSubmitted(fleet.now, spec, "token", stored))
    return fleet


def prepares(fleet: Fleet) -> list[Prepare]:
    return [order for order in fleet.orders(Prepare).values() if isinstance(order, Prepare)]


def test_the_first_generation_restores_it_under_the_name_of_the_job_that_saved_it() -> None:
    fleet = resumed()
    for order in prepares(fleet):
        assert (order.restore_step, order.restore_mesh) == (1200, Mesh.of({"dp": 2}))
        [restore] = order.restore
        assert restore.shard == ShardKey(ATTEMPT, 1200, restore.rank)
        assert restore.sources == (ShardSource(OBJECT_STORE, "gs://bucket/prefix", "old"),)
        assert order.attempt > ATTEMPT
    fleet.run()
    assert fleet.job.progress.step == 1200


@pytest.mark.parametrize(("sharded", "parts"), [(False, 1), (True, 4)])
def test_in_another_number_of_replicas(sharded: bool, parts: int) -> None:
    fleet = resumed(2, saved_dp=4, sharded=sharded)
    assert [len(order.restore) for order in prepares(fleet)] == [parts, parts]


def test_a_clock_that_was_ahead_does_not_make_the_old_attempt_the_newer_one() -> None:
    fleet = resumed(attempt=5_000_000_000)
    assert {order.attempt for order in prepares(fleet)} == {5_000_000_001}


def test_until_it_has_saved_itself_a_fault_goes_back_to_it() -> None:
    fleet = resumed()
    fleet.run()
    fleet.train(1205)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert {order.restore_step for order in prepares(fleet)} == {1200}
    fleet.run()
    fleet.train(1210, save=True)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert {order.restore_step for order in prepares(fleet)} == {1210}


def test_unavailable_store_delays_start_instead_of_restarting_from_step_0() -> None:
    fleet = resumed()
    send = next(send for send in fleet.sent if isinstance(send.order, Prepare))
    fleet.report(send.node, OrderDone(send.command_id, False, "403 for the bucket", unrestorable=True))
    assert fleet.job.phase is JobPhase.WAITING
    assert "403 for the bucket" in fleet.job.reason
    fleet.answer_orders()
    fleet.wait(fleet.state.config.unrestorable_s - 1.0)
    assert not prepares(fleet)
    fleet.wait(2.0)
    assert {order.restore_step for order in prepares(fleet)} == {1200}


def test_another_job_of_that_name_starts_from_step_0() -> None:
    fleet = Fleet(2)
    fleet.submit(job(dp=2))
    assert {order.restore_step for order in prepares(fleet)} == {0}
    assert fleet.state.jobs[JOB].checkpoints.resumed is None
