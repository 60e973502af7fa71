"""The step at which all ranks save before a planned change: ahead of the newest step that anybody has reported."""

from __future__ import annotations

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.orders import CheckpointNow
from holdfast.supervisor.core.progress import SECOND_WITNESS_S
from holdfast.supervisor.protocol import CheckpointRequested, JobPhase, ResizeRequested
from holdfast.supervisor.timers import SaveTimeout

STEP_S = 0.1  # of `Fleet.train`


def growing() -> Fleet:
    """A job that runs one of two replicas. There is a node for the second, which is not asked for yet."""
    fleet = running(job(dp=2), spares=1, saved=20)
    fleet.fold(ResizeRequested(fleet.now, JOB, 1, "for a while"))
    fleet.save_asked()
    fleet.run()
    fleet.train(40, save=True)
    return fleet


def resize(fleet: Fleet) -> int:
    fleet.fold(ResizeRequested(fleet.now, JOB, 2, "as before"))
    order = fleet.orders(CheckpointNow)["n0"]
    assert isinstance(order, CheckpointNow)
    return order.at_step


def test_the_save_before_a_change_is_ahead_of_the_step_that_a_beat_reported() -> None:
    """Diagnostics hears only some of the nodes, and reports no steps."""
    fleet = growing()
    fleet.now += SECOND_WITNESS_S
    fleet.beat(90)
    assert 90 < resize(fleet) < 90 + 5 / STEP_S


@pytest.mark.parametrize("silent_s", [1.0, 3.0, 5.0])
def test_the_save_is_ahead_of_the_steps_since_the_newest_beat_that_was_folded(silent_s: float) -> None:
    fleet = growing()
    fleet.now += SECOND_WITNESS_S
    fleet.beat(90)
    fleet.now += silent_s
    assert resize(fleet) > 90 + silent_s / STEP_S


def test_a_pause_of_the_job_does_not_put_the_save_off() -> None:
    """Beats have told no newer step for a minute: the job evaluates, and step 90 is its newest."""
    fleet = growing()
    fleet.beat(90)
    fleet.now += 60.0
    assert 90 < resize(fleet) < 90 + 5 / STEP_S


def test_a_change_does_not_repeat_the_steps_that_only_beats_reported() -> None:
    fleet = growing()
    fleet.now += SECOND_WITNESS_S
    fleet.beat(90)
    resize(fleet)
    due = fleet.state.timers[SaveTimeout(JOB)]
    fleet.wait(due - fleet.now + 0.1)  # no save comes; the newest one is 50 steps old
    fleet.expect(JobPhase.RUNNING)
    assert fleet.job.planned is not None
    assert fleet.job.planned.tries == 2


def test_a_save_that_the_job_has_passed_is_not_used_again() -> None:
    fleet = growing()
    first = resize(fleet)
    fleet.now += SECOND_WITNESS_S
    fleet.beat(first + 10)
    fleet.fold(CheckpointRequested(fleet.now, JOB, "op-1"))
    again = [send.order for send in fleet.sent if isinstance(send.order, CheckpointNow) and send.node == "n0"]
    assert [order.at_step > first + 10 for order in again] == [False, True]
