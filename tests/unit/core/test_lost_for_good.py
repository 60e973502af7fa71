"""What was said and never arrived, or what a log forgot: nothing waits for it for ever, no healthy run is stopped for it."""

from __future__ import annotations

from fleet import JOB, Fleet, job, running

from holdfast.domain.findings import FindingKind
from holdfast.domain.nodes import RunningWorker, WorkerEnded
from holdfast.domain.orders import Hello, Prepare, Stop
from holdfast.supervisor.core.reconcile import STILL_FACTOR
from holdfast.supervisor.protocol import JobPhase, LeaderStarted, NodeGone


def reporting(spares: int = 0) -> Fleet:
    """A run whose agents report their workers and steps."""
    fleet = running(job(dp=3), spares=spares, saved=10)
    fleet.all_live()
    return fleet


# ---------------------------------------------------------------- a hang that nobody found


def test_a_run_without_steps_is_a_fault_though_every_process_lives() -> None:
    fleet = reporting()
    patience_s = STILL_FACTOR * fleet.job.spec.hang.init_s
    fleet.wait(patience_s - 10.0)
    assert fleet.job.phase is JobPhase.RUNNING
    assert not fleet.state.incidents
    fleet.wait(20.0)
    assert fleet.incident.kind == FindingKind.HANG
    assert "no rank of job has finished a step after 10" in fleet.incident.cause
    fleet.run()
    assert fleet.job.phase is JobPhase.RUNNING


def test_a_step_that_any_node_reports_keeps_a_run_from_being_called_hung() -> None:
    fleet = reporting()
    for each in range(11, 31):
        fleet.wait(fleet.job.spec.hang.init_s)
        fleet.beat(each)
    assert fleet.job.number == 1
    assert not fleet.state.closed


# ---------------------------------------------------------------- reports of the ranks


def test_a_run_whose_first_steps_were_reported_in_vain_is_seen_to_step() -> None:
    fleet = Fleet(3)
    fleet.submit(job(dp=3))
    fleet.answer_orders()
    fleet.all_live()
    assert fleet.job.phase is JobPhase.STARTING
    fleet.beat(1)
    fleet.wait(5.0)
    assert fleet.job.phase is JobPhase.STARTING, "one node's step may be ahead of the others"
    fleet.beat(2)
    fleet.wait(5.0)
    assert fleet.job.phase is JobPhase.RUNNING
    fleet.wait(fleet.job.spec.limits.first_step_timeout_s)
    assert fleet.job.number == 1


def test_a_job_ends_though_the_report_of_its_end_was_lost() -> None:
    fleet = reporting()
    for rank in range(3):
        fleet.workers(f"n{rank}", ended=(WorkerEnded(JOB, 1, rank, exit_code=0),))
    assert fleet.job.phase is JobPhase.COMPLETED


# ---------------------------------------------------------------- a log that went back


def test_a_generation_that_only_nodes_remember_has_its_number() -> None:
    fleet = reporting(spares=1)
    fleet.workers("n1", 1, generation=4)
    fleet.lose("n0")
    assert fleet.job.number == 5
    assert {order.generation for order in fleet.orders(Prepare).values() if isinstance(order, Prepare)} == {5}


def test_orders_of_two_terms_never_bear_the_same_id() -> None:
    fleet = reporting()
    before = fleet.state
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    lost = {send.command_id for send in fleet.sent}
    fleet.state, fleet.sent = before, []  # the last second of the log is gone
    fleet.fold(LeaderStarted(fleet.now, before.epoch + 1))
    fleet.find(FindingKind.WORKER_CRASH, "n2", rank=2)
    assert not lost & {send.command_id for send in fleet.sent}


def test_what_is_left_of_a_forgotten_run_stops_before_the_next_one_starts() -> None:
    fleet = Fleet(3)
    fleet.submit(job(dp=2))
    stray = RunningWorker(JOB, 0, 0, 1)
    fleet.report("n2", Hello(fleet.facts("n2"), (stray,), workers_version=3))
    assert set(fleet.orders(Stop)) == {"n2"}
    fleet.answer_orders("n2")
    assert fleet.job.phase is JobPhase.PREPARING
    fleet.done("n2", Stop)
    assert fleet.job.phase is JobPhase.STARTING


# ---------------------------------------------------------------- time in which nobody led


def test_a_leader_hears_agents_before_it_concludes_anything_from_their_silence() -> None:
    fleet = running(job(dp=2), spares=1, saved=10)
    fleet.lose("n0")
    assert fleet.job.phase is JobPhase.PREPARING
    fleet.now += 3600.0  # nobody led, or the new leader's clock is ahead
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.wait(0.5)
    assert fleet.job.number == 2
    for node in ("n1", "n2"):
        fleet.hello(node)
    fleet.run("n0")
    assert fleet.job.phase is JobPhase.RUNNING
    assert fleet.job.number == 2


def test_two_short_terms_in_a_row_leave_agents_the_time_to_come_back() -> None:
    fleet = reporting()
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.now += 60.0
    fleet.fold(LeaderStarted(fleet.now, 3))
    fleet.wait(0.1)
    fleet.find(FindingKind.NODE_LOST, "n1")  # it waited in the log
    fleet.wait(1.0)
    for node in ("n0", "n1", "n2"):
        fleet.hello(node, running=1)
    fleet.wait(10.0)
    assert fleet.job.number == 1
    assert not fleet.state.incidents


def test_a_session_that_the_supervisor_itself_ended_is_no_second_witness() -> None:
    """A report was lost, and the agent is asked to begin again, while diagnostics misses its telemetry."""
    fleet = running(job(dp=3), spares=1)
    fleet.find(FindingKind.NODE_LOST, "n1")
    fleet.wait(1.0)
    fleet.fold(NodeGone(fleet.now, "n1", "n1-1", renewed=True))
    assert not fleet.state.incidents
    fleet.wait(1.0)
    fleet.hello("n1", running=1)
    fleet.wait(30.0)
    assert fleet.job.phase is JobPhase.RUNNING
    assert not fleet.state.closed


def test_a_job_that_never_ran_is_not_given_up_because_nodes_vanish() -> None:
    fleet = Fleet(3)
    fleet.submit(job(dp=3, min_dp=3))
    for _ in range(6):
        fleet.gone("n2")
        fleet.wait(1.0)
        fleet.hello("n2")
        fleet.wait(11.0)
    assert fleet.job.phase is not JobPhase.FAILED
    fleet.run()
    assert fleet.job.phase is JobPhase.RUNNING


def test_ranks_whose_first_steps_were_reported_to_nobody_are_not_missing_while_steps_go_on() -> None:
    fleet = Fleet(3)
    fleet.submit(job(dp=3, first_step_timeout_s=20.0))
    fleet.answer_orders()
    for number in range(1, 60):
        fleet.wait(1.0)
        fleet.beat(number)
    assert not fleet.state.incidents
    assert not fleet.state.closed
