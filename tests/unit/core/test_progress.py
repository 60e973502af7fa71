"""A job ends for want of progress only when it makes none: what counts as progress, whoever saw it."""

from __future__ import annotations

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.findings import FindingKind
from holdfast.domain.orders import Prepare, RanksStepping
from holdfast.supervisor.protocol import JobPhase


def crash(fleet: Fleet, *, observed_steps: int = 0, error_class: str = "") -> None:
    """A rank crashes; nobody is suspect."""
    fleet.find(FindingKind.WORKER_CRASH, "", rank=1, observed_steps=observed_steps, error_class=error_class)


def start(fleet: Fleet, *, steps: int) -> None:
    """The next generation starts, and every rank finishes so many steps, as agents report; diagnostics says nothing."""
    fleet.now += 0.1
    fleet.answer_orders()
    if steps:
        assert fleet.job.generation is not None
        fleet.step_all(fleet.job.generation.restore.step + steps)


def test_generations_that_finish_no_step_end_the_job() -> None:
    fleet = running(job(dp=2), saved=10)
    for _ in range(4):
        crash(fleet)
        if fleet.orders(Prepare):
            start(fleet, steps=0)
    assert fleet.job.phase is JobPhase.FAILED
    assert "3 generations in a row finished no new step" in fleet.job.reason
    assert fleet.job.number == 4, "the first one trained, three did not"


def test_a_job_without_restarts_that_finishes_no_step_says_so() -> None:
    fleet = running(job(dp=2, restarts_without_progress_max=1), saved=10)
    crash(fleet)
    start(fleet, steps=0)
    crash(fleet)
    assert fleet.job.phase is JobPhase.FAILED
    assert "The generation finished no new step, and no restart is allowed without one: " in fleet.job.reason


def test_a_prepared_worker_that_crashes_before_the_start_says_nothing_of_the_script() -> None:
    """Found by the simulator: a job was given up as "3 generations in a row", one of which had never been started."""
    fleet = running(job(dp=2), saved=10)
    crash(fleet)
    start(fleet, steps=0)
    crash(fleet)
    assert fleet.job.running is not None
    assert fleet.job.number > fleet.job.running.number
    crash(fleet)  # of those that are being prepared
    assert fleet.job.progress.restarts_without_progress == 1
    start(fleet, steps=0)
    crash(fleet)
    assert fleet.job.phase is not JobPhase.FAILED


def test_prepared_workers_that_crash_again_and_again_end_the_job() -> None:
    fleet = running(job(dp=2), saved=10)
    crash(fleet)
    tries = 0
    while fleet.job.phase is not JobPhase.FAILED:
        crash(fleet)
        tries += 1
        assert tries < 20
    assert "9 generations in a row" in fleet.job.reason


def test_progress_forgives_earlier_restarts() -> None:
    fleet = running(job(dp=2))
    for count in range(20):
        fleet.train(count + 1)
        crash(fleet)
        fleet.run()
    assert fleet.job.phase is JobPhase.RUNNING
    assert (fleet.job.progress.restarts_without_progress, fleet.job.progress.restarts_without_advance) == (0, 1)


def test_new_checkpoints_are_progress_while_diagnostics_is_away() -> None:
    fleet = running(job(dp=2))
    for number in range(1, 21):
        fleet.save(100 * number)  # the inventories are the only witness
        crash(fleet)
        start(fleet, steps=1)
        assert fleet.job.phase is JobPhase.RUNNING
        assert fleet.job.progress.step == 100 * number


def test_a_checkpoint_that_became_complete_after_the_fault_is_progress() -> None:
    fleet = running(job(dp=2), saved=10)
    for number in range(2, 12):
        crash(fleet)
        fleet.save(10 * number)  # the generation that ended had saved it; it restores 10 × (number - 1) meanwhile
        start(fleet, steps=0)
    assert fleet.job.phase is not JobPhase.FAILED


def test_first_steps_that_agents_report_are_progress() -> None:
    fleet = running(job(dp=2, interval=1000), saved=1000)
    for _ in range(4):
        crash(fleet)
        start(fleet, steps=1)
    assert fleet.job.phase is JobPhase.RUNNING
    assert fleet.job.progress.restarts_without_progress == 0


def test_one_rank_that_reports_a_new_step_speaks_for_all() -> None:
    """Found by the simulator: the step needed every rank, and what the others reported was lost with the log. A job whose ranks
    do not need each other ends as well, later."""
    fleet = running(job(dp=2), saved=10)
    tries = 0
    while fleet.job.phase is not JobPhase.FAILED:
        crash(fleet)
        tries += 1
        if fleet.orders(Prepare):
            start(fleet, steps=0)
            fleet.report("n0", RanksStepping(JOB, fleet.job.number, (0,), 11, fleet.now))
    assert tries == 10
    assert "9 generations in a row did not pass step" in fleet.job.reason


def test_the_ranks_that_can_be_heard_speak_for_a_node_that_was_lost() -> None:
    """Found by the simulator: the node that was lost had finished the step as well, and nobody could hear it report that."""
    fleet = running(job(dp=2), spares=3, saved=10)
    for count in range(4):
        crash(fleet)
        start(fleet, steps=0)
        fleet.report("n0", RanksStepping(JOB, fleet.job.number, (0,), 11, fleet.now))
        assert fleet.job.generation is not None
        fleet.lose(fleet.job.generation.nodes[1])
        start(fleet, steps=0)
        assert fleet.job.phase is not JobPhase.FAILED, f"crash {count + 1}, a new step before each"


def test_steps_that_are_done_again_after_a_rollback_are_progress() -> None:
    fleet = running(job(dp=2), saved=10)
    fleet.train(100, save=True)
    fleet.find(FindingKind.SILENT_CORRUPTION, verified_step="15")
    fleet.run()
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == 10
    for step in (20, 30, 40, 50, 60):
        fleet.train(step)
        fleet.save(step)
        fleet.train(step + 5)
        crash(fleet)
        fleet.run()
        assert fleet.job.phase is JobPhase.RUNNING, (
            f"step {step} was finished anew, though {fleet.job.progress.best_step} had been"
        )


def test_doing_the_same_steps_again_and_again_ends_the_job_after_more_tries() -> None:
    fleet = running(job(dp=2), saved=10)
    tries = 0
    while fleet.job.phase is JobPhase.RUNNING:
        fleet.train(16)
        crash(fleet)
        tries += 1
        if fleet.orders(Prepare):
            fleet.run()
    assert fleet.job.phase is JobPhase.FAILED
    assert "9 generations in a row did not pass step 16" in fleet.job.reason
    assert tries == 10, "the first generation had started from step 0"


def test_a_checkpoint_in_between_begins_the_count_anew() -> None:
    fleet = running(job(dp=2), saved=10)
    for count in range(24):
        if count % 8 == 7:
            fleet.save(20 + count)
        assert fleet.job.generation is not None
        fleet.train(fleet.job.generation.restore.step + 6)
        crash(fleet)
        fleet.run()
    assert fleet.job.phase is JobPhase.RUNNING


def crashed_without_steps(times: int, *, after_s: float, observed_steps: int = 0, **limits: float) -> Fleet:
    """A script that reports no steps, and crashes each time after it has run for so long."""
    fleet = Fleet(2)
    fleet.submit(job(dp=2, **limits))  # type: ignore[arg-type]
    for _ in range(times):
        fleet.answer_orders()
        fleet.step_all(0)
        fleet.wait(after_s)
        crash(fleet, observed_steps=observed_steps)
    return fleet


def test_a_script_that_reports_no_steps_has_made_progress_when_it_ran_for_long() -> None:
    fleet = crashed_without_steps(12, after_s=301)
    assert fleet.job.phase is not JobPhase.FAILED


def test_a_script_that_reports_no_steps_is_not_said_to_have_finished_none() -> None:
    """Its own checkpoints may advance from start to start, which nobody sees."""
    fleet = crashed_without_steps(4, after_s=30)
    assert fleet.job.phase is JobPhase.FAILED
    assert "finished no new step" not in fleet.job.reason
    assert "3 generations in a row failed within minutes of their start" in fleet.job.reason
    assert "no optimizer step was observed" in fleet.job.reason
    assert "limits.restarts_without_progress_max" in fleet.job.reason


@pytest.mark.parametrize(("limit", "starts"), [(3, 9), (1, 3)])
def test_a_script_whose_optimizer_steps_are_observed_is_started_more_often(limit: int, starts: int) -> None:
    """Its own checkpoints may advance from start to start, which nobody sees."""
    fleet = crashed_without_steps(starts - 1, after_s=30, observed_steps=70, restarts_without_progress_max=limit)
    assert fleet.job.phase is not JobPhase.FAILED
    fleet = crashed_without_steps(starts, after_s=30, observed_steps=70, restarts_without_progress_max=limit)
    assert fleet.job.phase is JobPhase.FAILED
    assert f"{starts} generations in a row failed within minutes of their start" in fleet.job.reason
    assert "limits.restarts_without_progress_max" in fleet.job.reason


def test_observed_steps_of_a_script_that_reports_steps_are_no_progress() -> None:
    """They may be a warm-up before its first step."""
    fleet = Fleet(2)
    fleet.submit(job(dp=2))
    for _ in range(3):
        fleet.answer_orders()
        fleet.wait(30)
        crash(fleet, observed_steps=70)
    assert fleet.job.phase is JobPhase.FAILED


def test_starts_without_observed_steps_count_from_the_last_start_with_some() -> None:
    fleet = crashed_without_steps(2, after_s=30)
    for steps in (70, 0, 0):
        fleet.answer_orders()
        fleet.step_all(0)
        fleet.wait(30)
        crash(fleet, observed_steps=steps)
        assert fleet.job.phase is not JobPhase.FAILED
    fleet.answer_orders()
    fleet.step_all(0)
    crash(fleet)
    assert fleet.job.phase is JobPhase.FAILED


def test_a_failed_start_with_learned_modules_is_not_the_scripts_but_the_number_of_such_starts_is_limited() -> None:
    fleet = running(job(dp=2), saved=10)
    crash(fleet)
    for _ in range(4):
        start(fleet, steps=0)
        crash(fleet, error_class="learned_start")
    assert fleet.job.progress.restarts_without_progress == 0
    assert not fleet.job.phase.finished
    for _ in range(9):
        if fleet.orders(Prepare):
            start(fleet, steps=0)
            crash(fleet, error_class="learned_start")
    assert fleet.job.phase is JobPhase.FAILED
