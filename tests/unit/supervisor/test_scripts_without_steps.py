"""What is known, and shown, of a job whose script reports no steps."""

from __future__ import annotations

import math

import pytest
from fleet import JOB, Fleet, job

from holdfast.domain.findings import FindingKind
from holdfast.domain.orders import StepReached
from holdfast.supervisor.api import job_views
from holdfast.supervisor.picture import Picture, Progress
from holdfast.supervisor.protocol import GenerationChanged, GenerationStage, JobPhase


@pytest.fixture
def fleet() -> Fleet:
    """Two nodes whose ranks run, and have reported no step."""
    fleet = Fleet(2)
    fleet.submit(job(dp=2))
    fleet.answer_orders()
    fleet.step_all(0)
    fleet.all_live()
    assert fleet.job.phase is JobPhase.RUNNING
    return fleet


def seen(fleet: Fleet, beats: dict[str, tuple[StepReached, ...]]) -> tuple[int | None, int | None, float | None]:
    later = fleet.now + job_views.SILENT_S
    picture = Picture(fleet.state, leading=True, at=later, steps_of=lambda node: beats.get(node, ()))
    shown = job_views.job_summary(picture, Progress(), fleet.job)
    return shown.step, shown.observed_steps, shown.observed_step_s


def test_the_record_says_that_no_step_was_reported(fleet: Fleet) -> None:
    [record] = [
        each for each in fleet.records if isinstance(each, GenerationChanged) and each.stage is GenerationStage.STEPPING
    ]
    assert not record.reports_steps
    assert record.reason == "every rank runs; the script reports no steps"


def test_what_is_shown_is_what_every_rank_has_done(fleet: Fleet) -> None:
    n0, n1 = (StepReached(JOB, 1, 0, count, step_s) for count, step_s in ((640, 0.25), (633, 0.26)))
    assert seen(fleet, {"n0": (n0,), "n1": (n1,)}) == (None, 633, 0.26)


@pytest.mark.parametrize(
    "other",
    [
        (),
        (StepReached(JOB, 1, 0),),
        (StepReached(JOB, 2, 0, 633, 0.25),),
        (StepReached("another", 1, 0, 633, 0.25),),
        (StepReached(JOB, 1, 0, 633, math.nan),),
    ],
    ids=["silent", "none observed", "another generation", "another job", "garbage"],
)
def test_what_one_node_does_not_say_is_not_known(fleet: Fleet, other: tuple[StepReached, ...]) -> None:
    assert seen(fleet, {"n0": (StepReached(JOB, 1, 0, 640, 0.25),), "n1": other}) == (None, None, None)


def test_a_standby_has_no_beats(fleet: Fleet) -> None:
    assert job_views.job_summary(Picture(fleet.state), Progress(), fleet.job).observed_steps is None


def test_a_script_that_may_still_be_importing_is_at_step_0(fleet: Fleet) -> None:
    """Its agents assume after five seconds that it runs, and nobody knows yet whether it reports steps."""

    def shown() -> int | None:
        return job_views.job_summary(Picture(fleet.state, leading=True, at=fleet.now), Progress(), fleet.job).step

    assert shown() == 0
    fleet.wait(job_views.SILENT_S)
    assert shown() is None


def test_a_script_that_has_ended_is_not_at_step_0(fleet: Fleet) -> None:
    fleet.finish()
    assert fleet.job.phase is JobPhase.COMPLETED
    assert job_views.job_summary(Picture(fleet.state, leading=True, at=fleet.now), Progress(), fleet.job).step is None


def test_a_first_step_that_comes_late_is_a_step(fleet: Fleet) -> None:
    """The script was silent for longer than an agent waits, as with imports that take a minute."""
    fleet.wait(60.0)
    fleet.train(1)
    assert seen(fleet, {}) == (1, None, None)
    assert not fleet.job.progress.reports_no_steps


def test_steps_that_began_late_are_missed_when_they_stop(fleet: Fleet) -> None:
    fleet.wait(4000.0)
    assert fleet.job.phase is JobPhase.RUNNING, "of a script without steps, none is missed"
    fleet.train(5)
    fleet.wait(4000.0)
    assert FindingKind.HANG in {incident.kind for incident in (*fleet.state.incidents.values(), *fleet.state.closed)}


def reason(fleet: Fleet) -> str:
    return job_views.job_summary(Picture(fleet.state, leading=True, at=fleet.now), Progress(), fleet.job).reason


def test_the_reason_says_that_no_steps_are_reported(fleet: Fleet) -> None:
    assert "reports no steps" not in reason(fleet), "it may still be importing"
    fleet.wait(job_views.SILENT_S)
    fleet.all_live()
    assert reason(fleet).endswith("its script reports no steps (docs/scripts.md)")
    fleet.train(1)
    assert "reports no steps" not in reason(fleet)


def test_a_job_that_waits_for_its_first_step_says_what_it_waits_for() -> None:
    fleet = Fleet(2)
    fleet.submit(job(dp=2, first_step_timeout_s=300.0))
    fleet.answer_orders()
    assert fleet.job.phase is JobPhase.STARTING
    assert "run.step" not in reason(fleet)
    fleet.wait(job_views.SILENT_S + 15.0)
    assert "not every rank has reported a step 75 s after the start" in reason(fleet)
    assert "takes longer than 300 s, raise limits.first_step_timeout_s" in reason(fleet)
