"""What was said and never arrived, or what a log forgot: nothing waits for it for ever, no healthy run is stopped for it."""

from __future__ import annotations

from fleet import JOB, Fleet, job, running

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import FindingKind
from holdfast.domain.incidents import ActionKind
from holdfast.domain.nodes import RunningWorker, WorkerEnded
from holdfast.domain.orders import Hello, Prepare, RanksStepping, Stop
from holdfast.policy import wait
from holdfast.supervisor.core import Config
from holdfast.supervisor.core.changes.presence import STILL_FACTOR
from holdfast.supervisor.core.progress import start_patience_s
from holdfast.supervisor.protocol import BreakerResetRequested, JobPhase, LeaderStarted, NodeGone


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
    fleet.expect(JobPhase.RUNNING)
    fleet.wait(start_patience_s(fleet.job))
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
    fleet.expect(JobPhase.STARTING)


def test_what_is_left_of_a_forgotten_run_stops_first_whatever_its_number_is() -> None:
    """The log lost everything: the job begins with generation 1 again, and a node that comes back still runs generation 2."""
    fleet = Fleet(2)
    fleet.submit(job(dp=1))
    assert fleet.nodes() == ("n0",)
    fleet.report("n1", Hello(fleet.facts("n1"), (RunningWorker(JOB, 2, 0, 1),), workers_version=3))
    fleet.answer_orders("n1")
    assert fleet.job.phase is JobPhase.PREPARING
    fleet.done("n1", Stop)
    fleet.expect(JobPhase.STARTING)


def test_nothing_starts_before_every_member_has_reported_its_workers_to_the_new_leader() -> None:
    """The log forgot generation 2, which was started; what is left says that generation 1 is prepared, but for one answer."""
    fleet = Fleet(3)
    fleet.submit(job(dp=3))
    fleet.answer_orders("n0")
    fleet.now += 1.0
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.hello("n0", running=1)
    fleet.done("n0", Prepare)
    fleet.hello("n1", running=1)
    assert fleet.job.phase is JobPhase.PREPARING
    fleet.report("n2", Hello(fleet.facts("n2"), (RunningWorker(JOB, 2, 2, 1),), workers_version=3))
    assert fleet.job.phase is JobPhase.PREPARING
    assert fleet.orders(Stop) == {"n2": Stop(JOB, 2)}
    fleet.done("n2", Stop)
    fleet.expect(JobPhase.STARTING)


def test_a_member_that_does_not_connect_to_a_new_leader_is_planned_around() -> None:
    fleet = Fleet(4)
    fleet.submit(job(dp=3))
    fleet.answer_orders("n0")
    fleet.now += 1.0
    fleet.fold(LeaderStarted(fleet.now, 2))
    for node in ("n0", "n1", "n3"):
        fleet.hello(node)
    fleet.done("n0", Prepare)
    fleet.wait(5.6)
    assert fleet.nodes() == ("n0", "n1", "n3")


# ---------------------------------------------------------------- time in which nobody led


def test_a_loss_that_a_new_leader_hears_of_waits_until_the_node_can_have_connected() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.gone("n0")  # its link broke for a moment, or it noticed the leader's end first
    fleet.now += 1.0
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.find(FindingKind.NODE_LOST, "n0")
    fleet.wait(1.0)
    assert "not decided yet: n0 has 5.0 s to reconnect to the supervisor" in fleet.notes()
    for node in ("n0", "n1", "n2", "n3"):
        fleet.hello(node, running=1)
    fleet.wait(30.0)
    assert fleet.job.number == 1
    assert not fleet.state.closed


def test_a_node_that_does_not_connect_to_a_new_leader_is_lost_when_the_time_for_it_is_over() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.gone("n0")
    fleet.now += 1.0
    fleet.fold(LeaderStarted(fleet.now, 2))
    for node in ("n1", "n2", "n3"):
        fleet.hello(node, running=1)
    fleet.find(FindingKind.NODE_LOST, "n0")
    fleet.wait(4.9)
    assert not fleet.state.incidents
    fleet.wait(0.2)
    assert (fleet.incident.kind, fleet.incident.node) == (FindingKind.NODE_LOST, "n0")


def test_a_session_that_breaks_in_the_term_of_a_new_leader_is_a_witness_at_once() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.now += 0.2
    fleet.hello("n0", running=1)
    fleet.now += 0.2
    fleet.lose("n0")
    assert (fleet.incident.kind, fleet.incident.node) == (FindingKind.NODE_LOST, "n0")


def test_the_time_for_the_first_step_starts_anew_with_a_leader_whose_clock_is_ahead() -> None:
    fleet = Fleet(3)
    fleet.submit(job(dp=3))
    fleet.answer_orders()
    assert fleet.job.phase is JobPhase.STARTING
    fleet.now += 3600.0
    fleet.fold(LeaderStarted(fleet.now, 2))
    for node in ("n0", "n1", "n2"):
        fleet.hello(node, running=1)
    fleet.wait(start_patience_s(fleet.job) - 1.0)
    assert not fleet.state.incidents
    fleet.wait(2.0)
    assert fleet.incident.kind == FindingKind.RANKS_MISSING


def test_the_time_to_prepare_starts_anew_with_a_leader_whose_clock_is_ahead() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.now += 3600.0
    fleet.fold(LeaderStarted(fleet.now, 2))
    for node in ("n0", "n1", "n2", "n3"):
        fleet.hello(node)
    fleet.wait(fleet.job.spec.limits.prepare_timeout_s - 1.0)
    assert fleet.job.number == 2
    fleet.wait(2.0)
    assert fleet.job.number > 2


def test_a_rank_is_not_missed_sooner_because_the_new_leader_s_clock_is_ahead() -> None:
    fleet = reporting()
    fleet.workers("n1")
    fleet.workers("n2")
    fleet.now += 3600.0
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.workers("n2", 2)
    fleet.wait(2.0)
    assert not fleet.state.incidents
    fleet.wait(4.0)
    assert fleet.incident.kind == FindingKind.RANKS_MISSING


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
    fleet.expect(JobPhase.RUNNING)
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


def test_a_node_whose_hello_was_lost_is_no_second_witness_either() -> None:
    """The supervisor ended its session, the Hello of the next one never arrived, and then diagnostics misses its telemetry."""
    fleet = running(job(dp=3), spares=1)
    for _ in range(3):
        fleet.fold(NodeGone(fleet.now, "n1", "n1-1", renewed=True))
        fleet.wait(4.0)
        fleet.find(FindingKind.NODE_LOST, "n1")
    assert not fleet.state.incidents
    fleet.wait(0.5)
    fleet.hello("n1", running=1)
    fleet.wait(30.0)
    assert fleet.job.phase is JobPhase.RUNNING
    assert not fleet.state.closed


def test_a_node_that_does_not_connect_again_after_the_supervisor_ended_its_session_is_lost() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.fold(NodeGone(fleet.now, "n1", "n1-1", renewed=True))
    fleet.find(FindingKind.NODE_LOST, "n1")
    fleet.wait(4.9)
    assert not fleet.state.incidents
    fleet.wait(0.2)
    assert (fleet.incident.kind, fleet.incident.node) == (FindingKind.NODE_LOST, "n1")


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


def test_a_job_that_waits_for_nodes_says_so_when_one_more_is_lost() -> None:
    """Found by the simulator: a lost node on which nothing ran left the reason of a waiting job as it was."""
    fleet = Fleet(3)
    fleet.submit(job(dp=3, min_dp=3))
    fleet.lose("n2")
    fleet.answer_orders()
    assert "2 are there, 1 missing" in fleet.job.reason
    fleet.gone("n0")
    fleet.now += 0.1
    fleet.find(FindingKind.NODE_LOST, "n0")
    assert "1 is there, 2 missing" in fleet.job.reason


def test_a_node_that_speaks_in_a_session_whose_hello_was_lost_is_not_called_lost() -> None:
    """Found by the simulator: two witnesses were silent, and a third, its own report, was not heard."""
    fleet = running(job(dp=2), spares=1, saved=10)
    fleet.fold(LeaderStarted(fleet.now, 2, "secret"))
    fleet.session = 7
    for node in ("n0", "n2"):
        fleet.hello(node)
    fleet.wait(Config().session_s - 1.0)
    fleet.report("n1", RanksStepping(JOB, 1, (1,), 11, fleet.now))
    fleet.wait(2.0)
    fleet.find(FindingKind.NODE_LOST, "n1")
    assert not fleet.state.incidents
    fleet.wait(Config().session_s + 1.0)
    assert fleet.incident.kind == FindingKind.NODE_LOST, "nothing more came"


def test_a_job_that_waits_is_decided_about_again_when_the_breaker_has_closed() -> None:
    """Found by the simulator: the time to try again came while the breaker was open, and never again."""
    fleet = running(job(dp=2, min_dp=2), decide=False)
    fleet.lose("n1")
    fleet.answer(wait("look again in a minute", retry_s=60.0))
    is_open = evolve(fleet.state.breaker, open_until=fleet.now + 1000.0, reason="a test")
    fleet.state = evolve(fleet.state, breaker=is_open)
    fleet.wait(90.0)
    assert not fleet.questions
    fleet.fold(BreakerResetRequested(fleet.now, "looked"))
    fleet.wait(10.0)
    assert [question.job for question in fleet.questions] == [JOB]


def test_a_rank_that_ended_by_what_nobody_found_says_nothing_of_its_node() -> None:
    """Found by a soak: the others of a lost node's ranks end as well; with its finding lost, a healthy node was swapped."""
    fleet = running(job(dp=3), spares=1, saved=10)
    fleet.all_live()
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    fleet.train(20, save=True)
    fleet.all_live()
    fleet.workers("n1", ended=(WorkerEnded(JOB, fleet.job.number, 1, exit_code=1),))
    fleet.wait(10.0)
    assert (fleet.incident.kind, fleet.incident.node) == (FindingKind.RANKS_MISSING, "n1")
    assert fleet.incident.action is not None
    assert fleet.incident.action.kind is ActionKind.RESTART
    fleet.find(FindingKind.WORKER_EXCEPTION, "", rank=0)
    assert (fleet.incident.kind, fleet.incident.node) == (FindingKind.WORKER_EXCEPTION, "")
