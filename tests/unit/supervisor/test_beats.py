"""Which steps of agents' beats are passed to the core: when diagnostics is silent, and to end a start."""

from __future__ import annotations

from fleet import JOB, Fleet, job, running

from holdfast.domain.orders import StepReached
from holdfast.supervisor.agents.beats import SECOND_WITNESS_S, steps_to_fold
from holdfast.supervisor.protocol import JobPhase


def reported(fleet: Fleet, step: int) -> bool:
    """Whether this step is passed to the core; marks it as passed."""
    due = steps_to_fold([("n1", StepReached(JOB, fleet.job.number, step))], fleet.state, fleet.now)
    for _, each in due:
        fleet.beat(each.step)
    return bool(due)


def starting() -> Fleet:
    fleet = Fleet(3)
    fleet.submit(job(dp=3))
    fleet.answer_orders()
    fleet.all_live()
    assert fleet.job.phase is JobPhase.STARTING
    return fleet


def test_a_run_of_which_diagnostics_tells_needs_no_beats() -> None:
    fleet = running(job(dp=3))
    fleet.train(20)
    fleet.wait(SECOND_WITNESS_S - 1.0)
    assert not reported(fleet, 25)
    fleet.wait(1.0)
    assert reported(fleet, 26)


def test_the_second_step_of_a_start_is_passed_on_at_once_when_beats_contained_the_first() -> None:
    """The order to start came late, and the ranks' reports of their first steps were lost."""
    fleet = starting()
    assert not reported(fleet, 1)
    fleet.wait(fleet.job.spec.limits.first_step_timeout_s - 3.0)
    assert reported(fleet, 1)
    fleet.wait(1.0)
    assert reported(fleet, 2)
    fleet.wait(5.0)
    fleet.expect(JobPhase.RUNNING)
    assert fleet.job.number == 1
