"""How long a start may take: a job that has never stepped may index its data or compile, and nobody knows for how long."""

from __future__ import annotations

import pytest
from fleet import Fleet, job, running

from holdfast.domain.findings import FindingKind, Severity
from holdfast.domain.orders import Prepare, RanksFinished, RanksStepping
from holdfast.supervisor.alerts.alert import Topic, alert_of
from holdfast.supervisor.core.progress import FIRST_MESSAGE_S, FIRST_START_S, LATER_START_S, start_patience_s
from holdfast.supervisor.protocol import FindingJudged, JobPhase, LeaderStarted


def starting(first_step_timeout_s: float = 0.0) -> Fleet:
    """A job that was started for the first time."""
    fleet = Fleet(2)
    fleet.submit(job(dp=2, first_step_timeout_s=first_step_timeout_s))
    fleet.answer_orders()
    assert fleet.job.phase is JobPhase.STARTING
    return fleet


def crash(fleet: Fleet) -> None:
    """Rank 1 is killed, and the ranks are started again."""
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.answer_orders()
    assert fleet.job.phase is JobPhase.STARTING


def warnings(fleet: Fleet) -> list[FindingJudged]:
    return [
        each
        for each in fleet.records
        if isinstance(each, FindingJudged) and each.finding.kind == FindingKind.RANKS_MISSING
        if each.finding.severity is Severity.WARNING
    ]


def test_a_first_start_that_takes_long_is_a_warning_and_goes_on() -> None:
    fleet = starting()
    fleet.wait(LATER_START_S - 1.0)
    assert not warnings(fleet)
    fleet.wait(2.0)
    [warning] = warnings(fleet)
    assert "ranks finished no step within 600 s of the start of generation 1" in warning.finding.summary
    assert warning.verdict.endswith("it has 3600 s")
    fleet.wait(FIRST_START_S - LATER_START_S - 2.0)
    assert (fleet.job.number, fleet.job.phase) == (1, JobPhase.STARTING), "nobody knows that it hangs"
    fleet.step_all()
    fleet.expect(JobPhase.RUNNING)
    fleet.wait(2 * FIRST_START_S)
    assert fleet.job.number == 1
    assert len(warnings(fleet)) == 1


def test_a_first_start_that_never_ends_is_ended_after_an_hour() -> None:
    fleet = starting()
    fleet.wait(FIRST_START_S + 1.0)
    assert fleet.incident.kind == FindingKind.RANKS_MISSING
    assert fleet.job.number == 2


def test_the_operator_hears_of_a_slow_first_start() -> None:
    fleet = starting()
    fleet.wait(LATER_START_S + 1.0)
    [alert] = [found for each in fleet.records if (found := alert_of(each, [Topic.NOTIFY])) is not None]
    assert alert.title == f"{fleet.job.name}: has not stepped yet"
    assert "2 of 2 ranks" in alert.text


def test_a_limit_in_the_job_file_is_kept_without_a_warning() -> None:
    fleet = starting(first_step_timeout_s=60.0)
    fleet.wait(59.0)
    assert fleet.job.number == 1
    fleet.wait(2.0)
    assert fleet.incident.kind == FindingKind.RANKS_MISSING
    assert not warnings(fleet)


def test_a_job_that_has_stepped_has_ten_minutes() -> None:
    fleet = running(job(dp=2))
    crash(fleet)
    fleet.wait(LATER_START_S - 1.0)
    assert fleet.job.number == 2
    fleet.wait(2.0)
    assert fleet.job.number == 3
    assert not warnings(fleet)


@pytest.mark.parametrize("took_s", [LATER_START_S - 100.0, LATER_START_S + 900.0])
def test_a_restart_may_take_twice_as_long_as_the_longest_start(took_s: float) -> None:
    fleet = starting()
    fleet.wait(took_s)
    fleet.step_all()
    fleet.expect(JobPhase.RUNNING)
    crash(fleet)
    fleet.wait(2 * took_s - 1.0)
    assert fleet.job.number == 2
    fleet.wait(2.0)
    assert fleet.job.number == 3


def test_a_start_without_steps_says_nothing_about_a_start_with_steps() -> None:
    """The script was silent: its agents assume after seconds that it runs."""
    fleet = starting()
    fleet.wait(5.0)
    fleet.step_all(0)
    fleet.expect(JobPhase.RUNNING)
    assert start_patience_s(fleet.job) == FIRST_START_S


def test_a_new_leader_whose_clock_is_hours_ahead_neither_warns_nor_ends_the_start() -> None:
    fleet = starting()
    fleet.now += 3 * FIRST_START_S
    fleet.fold(LeaderStarted(fleet.now, 2))
    for node in ("n0", "n1"):
        fleet.hello(node, running=1)
    fleet.wait(LATER_START_S - 1.0)
    assert not warnings(fleet)
    fleet.wait(FIRST_START_S - LATER_START_S - 1.0)
    assert fleet.job.number == 1
    assert not fleet.state.incidents


def ranks_of(fleet: Fleet, node: str) -> tuple[int, ...]:
    assert fleet.job.generation is not None
    placement = fleet.job.generation.placement_of(node)
    assert placement is not None
    return tuple(placement.ranks)


@pytest.mark.parametrize("ends_first", [True, False])
def test_ranks_that_end_with_exit_code_0_before_a_step_do_not_keep_the_job_from_running(ends_first: bool) -> None:
    fleet = starting()
    steps = RanksStepping(fleet.about, 1, ranks_of(fleet, "n0"), 0, fleet.now)
    ends = RanksFinished(fleet.about, 1, ranks_of(fleet, "n1"), fleet.now)
    for node, report in (("n1", ends), ("n0", steps)) if ends_first else (("n0", steps), ("n1", ends)):
        assert fleet.job.phase is JobPhase.STARTING
        fleet.report(node, report)
    fleet.expect(JobPhase.RUNNING)
    fleet.wait(2 * FIRST_START_S)
    assert (fleet.job.number, fleet.job.phase) == (1, JobPhase.RUNNING)


def test_ranks_that_ended_are_not_missing_and_do_not_step_for_the_others() -> None:
    fleet = starting()
    fleet.report("n1", RanksFinished(fleet.about, 1, ranks_of(fleet, "n1"), fleet.now))
    fleet.wait(LATER_START_S + 1.0)
    assert fleet.job.phase is JobPhase.STARTING
    [warning] = warnings(fleet)
    assert "1 of 2 ranks" in warning.finding.summary


def first_message_s(fleet: Fleet) -> float:
    order = fleet.orders(Prepare)["n0"]
    assert isinstance(order, Prepare)
    return order.first_message_s


@pytest.mark.parametrize(("first_step_timeout_s", "waited_s"), [(0.0, FIRST_MESSAGE_S), (60.0, 30.0)])
def test_ranks_that_import_for_long_are_waited_for_once_the_script_has_reported_steps(
    first_step_timeout_s: float, waited_s: float
) -> None:
    """Otherwise they would count as running five seconds after each restart."""
    fleet = Fleet(2)
    fleet.submit(job(dp=2, first_step_timeout_s=first_step_timeout_s))
    assert first_message_s(fleet) == 0.0, "nothing is known of the script"
    fleet.answer_orders()
    fleet.step_all(0)  # the agents assume it
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert first_message_s(fleet) == 0.0, "it has reported nothing"
    fleet.answer_orders()
    fleet.step_all(0)
    fleet.train(3)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert first_message_s(fleet) == waited_s
