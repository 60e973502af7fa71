"""A stop with a save, of a job whose ranks cannot all save."""

from __future__ import annotations

import pytest
from fleet import JOB, job, running

from holdfast.domain.nodes import WorkerEnded
from holdfast.domain.orders import Stop
from holdfast.supervisor.core.model.lifecycle import Saving
from holdfast.supervisor.protocol import JobPhase, JobStopRequested, Noted


@pytest.mark.parametrize("before", [True, False])
def test_a_stop_does_not_wait_for_the_save_of_a_job_that_lacks_a_rank(before: bool) -> None:
    fleet = running(job(dp=2), saved=10)
    fleet.all_live()
    killed = (WorkerEnded(JOB, fleet.job.number, 1, signal=9),)
    if before:
        fleet.workers("n1", ended=killed)
    fleet.fold(JobStopRequested(fleet.now, JOB, "enough"))
    if not before:
        assert isinstance(fleet.job.doing, Saving)
        fleet.workers("n1", ended=killed)
    assert fleet.orders(Stop).keys() == {"n0", "n1"}
    notes = [record.text for record in fleet.records if isinstance(record, Noted) and record.subject == JOB]
    assert any("a rank of the job has ended" in text for text in notes)
    fleet.answer_orders()
    fleet.expect(JobPhase.STOPPED)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_stop_waits_for_the_inventories_if_the_ranks_may_have_saved(steps_before: int) -> None:
    fleet = running(job(dp=2), saved=10)
    fleet.all_live()
    fleet.fold(JobStopRequested(fleet.now, JOB, "enough"))
    assert isinstance(fleet.job.doing, Saving)
    at_step = fleet.job.doing.at_step
    fleet.train(at_step - steps_before)
    fleet.workers("n1", ended=(WorkerEnded(JOB, fleet.job.number, 1, signal=9),))
    assert not fleet.orders(Stop)
    fleet.save(at_step)
    assert fleet.orders(Stop)
    assert fleet.job.checkpoints.step == at_step


def test_a_stop_whose_save_did_not_come_before_a_rank_ended_goes_on_soon() -> None:
    fleet = running(job(dp=2), saved=10)
    fleet.all_live()
    fleet.fold(JobStopRequested(fleet.now, JOB, "enough"))
    assert isinstance(fleet.job.doing, Saving)
    fleet.train(fleet.job.doing.at_step)
    fleet.workers("n1", ended=(WorkerEnded(JOB, fleet.job.number, 1, signal=9),))
    fleet.wait(fleet.state.config.inventory_s + 0.1)
    assert fleet.orders(Stop)


def test_a_node_without_a_session_may_still_save_before_a_stop() -> None:
    fleet = running(job(dp=2), saved=10)
    fleet.all_live()
    fleet.gone("n1")
    fleet.fold(JobStopRequested(fleet.now, JOB, "enough"))
    assert isinstance(fleet.job.doing, Saving)
