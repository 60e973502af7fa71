"""What should run against what agents say that they run: no fault stays unnoticed because a finding was lost."""

from __future__ import annotations

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.errors import Conflict
from holdfast.domain.findings import FindingKind
from holdfast.domain.incidents import ActionKind, IncidentState
from holdfast.domain.nodes import NodeState, RunningWorker, WorkerEnded
from holdfast.domain.orders import Hello, OrderDone, Prepare, RanksFinished, RanksStepping, Stop, WorkersChanged
from holdfast.supervisor.core import check_submission
from holdfast.supervisor.core.model.lifecycle import Preparing
from holdfast.supervisor.protocol import JobPhase, JobStopRequested, LeaderStarted, Noted
from holdfast.supervisor.requests import check

KILLED = WorkerEnded(JOB, 1, 1, signal=9, ago_s=0.2)


def reporting(dp: int = 3, **more: int) -> Fleet:
    """A run whose agents report their workers."""
    fleet = running(job(dp=dp), **more)  # type: ignore[arg-type]
    fleet.all_live()
    return fleet


# ---------------------------------------------------------------- a rank without a process


def test_a_dead_rank_is_a_fault_though_no_finding_ever_comes() -> None:
    fleet = reporting(saved=10)
    fleet.workers("n1", ended=(KILLED,))
    fleet.wait(2.9)
    assert fleet.job.phase is JobPhase.RUNNING
    fleet.wait(0.2)
    assert fleet.incident.kind == FindingKind.RANKS_MISSING
    assert (fleet.incident.node, fleet.incident.rank) == ("n1", 1)
    assert "rank 1 on n1 was ended by signal 9: n1 reported it" in fleet.incident.cause
    assert fleet.incident.action is not None
    assert fleet.incident.action.kind is ActionKind.RESTART
    fleet.run()
    assert fleet.job.phase is JobPhase.RUNNING
    assert fleet.incident.state is IncidentState.RESOLVED


def test_the_fault_is_dated_by_what_the_agent_measured() -> None:
    fleet = reporting()
    fleet.wait(100.0)
    died_at = fleet.now
    fleet.wait(0.2)
    fleet.workers("n1", ended=(KILLED,))
    fleet.wait(3.1)
    assert fleet.incident.fault_at == pytest.approx(died_at)


def test_a_finding_is_quicker_and_nothing_is_found_twice() -> None:
    fleet = reporting(saved=10)
    fleet.workers("n1", ended=(KILLED,))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    fleet.all_live()
    fleet.wait(60.0)
    assert [incident.kind for incident in fleet.state.closed] == [FindingKind.WORKER_CRASH]
    assert not fleet.state.incidents


def test_a_finding_that_comes_later_names_the_culprit() -> None:
    fleet = reporting()
    fleet.workers("n0", ended=(WorkerEnded(JOB, 1, 0, exit_code=1),))
    fleet.workers("n1", ended=(KILLED,))
    fleet.wait(3.1)
    assert (fleet.incident.kind, fleet.incident.node) == (FindingKind.RANKS_MISSING, "")
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1, generation=1)
    assert (fleet.incident.kind, fleet.incident.node, fleet.incident.rank) == (FindingKind.WORKER_CRASH, "n1", 1)
    assert fleet.job.number == 2
    fleet.run()
    assert fleet.job.phase is JobPhase.RUNNING


def test_a_rank_that_ended_well_is_not_missed() -> None:
    fleet = reporting()
    fleet.workers("n1", ended=(WorkerEnded(JOB, 1, 1, exit_code=0),))
    fleet.wait(60.0)
    assert fleet.job.phase is JobPhase.RUNNING
    assert not fleet.state.incidents
    fleet.finish()
    fleet.expect(JobPhase.COMPLETED)


def test_an_agent_that_does_not_report_its_workers_is_believed_nothing() -> None:
    fleet = running(job())
    fleet.wait(600.0)
    assert fleet.job.phase is JobPhase.RUNNING
    assert not fleet.state.closed


def test_a_new_leader_misses_what_died_while_nobody_led() -> None:
    fleet = reporting(saved=10)
    fleet.gone("n0", "n1", "n2")
    fleet.now += 400.0
    fleet.fold(LeaderStarted(fleet.now, 2))
    for node, ranks in (("n0", (0,)), ("n1", ()), ("n2", (2,))):
        living = tuple(RunningWorker(JOB, 1, rank, 1) for rank in ranks)
        fleet.report(node, Hello(fleet.facts(node), living, workers_version=7))
    fleet.wait(3.1)
    assert (fleet.incident.kind, fleet.incident.node) == (FindingKind.RANKS_MISSING, "n1")
    fleet.run()
    assert fleet.job.phase is JobPhase.RUNNING


def test_workers_of_a_generation_that_was_given_up_are_stopped_whenever_they_are_reported() -> None:
    fleet = running(job(), spares=1)
    fleet.workers("n3", 0, generation=7)
    assert fleet.orders(Stop) == {"n3": Stop(JOB, 7)}


def test_a_node_with_workers_of_a_run_that_this_state_has_lost_is_no_spare() -> None:
    """Redis was emptied: the run goes on, nobody takes its nodes, and a submission under its name is refused."""
    fleet = Fleet(3)
    fleet.report("n0", WorkersChanged(4, (RunningWorker("old", 7, 0, 1),)))
    fleet.report("n1", WorkersChanged(4, (RunningWorker("old", 7, 1, 1),)))
    assert [fleet.state.nodes[name].state for name in ("n0", "n1", "n2")] == [
        NodeState.ACTIVE,
        NodeState.ACTIVE,
        NodeState.SPARE,
    ]
    fleet.submit(job(dp=3))
    assert fleet.job.phase is JobPhase.PENDING
    assert not fleet.orders(Stop)
    with pytest.raises(Conflict, match="are alive on n0, n1"):
        check_submission(fleet.state, job(dp=2, name="old"))
    stop = JobStopRequested(fleet.now, "old", "asked")
    check(fleet.state, stop)
    fleet.fold(stop)
    assert set(fleet.orders(Stop)) == {"n0", "n1"}
    fleet.answer_orders("n2")
    for node in ("n0", "n1"):
        fleet.report(node, WorkersChanged(5))
    fleet.run()
    fleet.expect(JobPhase.RUNNING)


# ---------------------------------------------------------------- a node without a session


def test_a_node_whose_loss_nobody_found_is_lost_when_its_peers_stand_still() -> None:
    fleet = reporting(spares=1, saved=10)
    fleet.beat(11)
    fleet.gone("n1")
    fleet.wait(14.0)
    assert fleet.job.phase is JobPhase.RUNNING
    fleet.wait(2.0)
    assert (fleet.incident.kind, fleet.incident.node) == (FindingKind.NODE_LOST, "n1")
    assert "no node of job has finished a step" in fleet.incident.cause
    fleet.run("n1")
    assert "n3" in fleet.nodes()


def test_a_node_that_is_cut_off_from_the_control_plane_is_not_lost_while_steps_go_on() -> None:
    fleet = reporting(spares=1, saved=10)
    fleet.gone("n1")
    for step in range(11, 311):
        fleet.beat(step)
        fleet.wait(2.0)
    assert fleet.job.phase is JobPhase.RUNNING
    assert not fleet.state.closed
    assert not fleet.state.incidents


def test_two_witnesses_are_contradicted_by_steps_that_go_on() -> None:
    """An agent is frozen, or cut off from the whole control plane: its ranks take part in every step."""
    fleet = reporting(spares=1, saved=10)
    last_heard = fleet.now
    for step in range(11, 18):
        fleet.wait(1.0)
        fleet.beat(step)
    fleet.gone("n1")
    fleet.find(FindingKind.NODE_LOST, "n1", since=last_heard)
    for step in range(18, 60):
        fleet.wait(1.0)
        fleet.beat(step)
    assert fleet.job.phase is JobPhase.RUNNING
    assert not fleet.state.incidents
    assert "contradicted: step 17 was finished after contact with n1 was lost" in fleet.notes()
    fleet.wait(5.0)  # and when it does die, its peers stand still
    assert (fleet.incident.kind, fleet.incident.node) == (FindingKind.NODE_LOST, "n1")


def test_a_loss_that_is_found_long_after_the_session_ended_is_contradicted_by_the_steps_since() -> None:
    """Diagnostics was frozen, and takes its own absence for the node's."""
    fleet = reporting(spares=1, saved=10)
    fleet.gone("n1")
    for step in range(11, 17):
        fleet.wait(1.0)
        fleet.beat(step)
    fleet.find(FindingKind.NODE_LOST, "n1", since=fleet.now - 0.2)
    for step in range(17, 30):
        fleet.wait(1.0)
        fleet.beat(step)
    assert not fleet.state.incidents
    fleet.wait(5.0)
    assert (fleet.incident.kind, fleet.incident.node) == (FindingKind.NODE_LOST, "n1")


def test_steps_of_the_time_before_do_not_contradict_a_loss() -> None:
    fleet = reporting(spares=1, saved=10)
    fleet.wait(30.0)
    lost_at = fleet.now
    fleet.wait(1.5)
    fleet.beat(12)  # finished before the loss, reported after it
    fleet.gone("n1")
    fleet.find(FindingKind.NODE_LOST, "n1", since=lost_at)
    assert fleet.job.phase is JobPhase.PREPARING


def test_a_job_on_one_node_is_lost_only_when_diagnostics_is_at_work_and_has_no_step_of_it() -> None:
    fleet = running(job(dp=1), spares=1, saved=10)
    fleet.all_live()
    fleet.gone("n0")
    fleet.wait(600.0)
    assert fleet.job.phase is JobPhase.RUNNING, "nobody has testified"
    fleet.find(FindingKind.HOST_PRESSURE, "n1", generation=0)
    fleet.wait(2.0)
    assert (fleet.incident.kind, fleet.incident.node) == (FindingKind.NODE_LOST, "n0")


# ---------------------------------------------------------------- the answer to Prepare says which workers there are


def prepared(fleet: Fleet, node: str, version: int) -> OrderDone:
    """The answer of `node` to the newest `Prepare`, as a report of its workers."""
    [send] = [send for send in fleet.sent if send.node == node and isinstance(send.order, Prepare)]
    assert isinstance(send.order, Prepare)
    workers = tuple(RunningWorker(JOB, send.order.generation, rank, 300 + rank) for rank in send.order.placement.ranks)
    master = f"{node}:1" if send.order.placement.first_rank == 0 else ""
    return OrderDone(send.command_id, True, "", master, fleet.now, workers=workers, workers_version=version)


def test_the_answer_to_prepare_is_the_report_of_the_workers() -> None:
    fleet = reporting()
    fleet.workers("n1", ended=(KILLED,))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    for node in ("n0", "n1", "n2"):
        fleet.report(node, prepared(fleet, node, 20))
        known = fleet.state.nodes[node]
        assert (known.workers_version, known.workers_at, known.ended) == (20, fleet.now, ())
        assert [(each.generation, each.pid) for each in known.workers] == [(2, 300 + int(node[1:]))]
        assert fleet.state.live_on(known) == {JOB: (2,)}
    fleet.answer_orders()
    fleet.step_all()
    fleet.wait(30.0)
    assert fleet.job.phase is JobPhase.RUNNING, "no rank is missing, though no other report has come"
    assert not fleet.state.incidents
    fleet.version["n1"] = 20
    fleet.workers("n1", ended=(WorkerEnded(JOB, 2, 1, signal=9),))
    fleet.wait(3.1)
    assert (fleet.incident.kind, fleet.incident.node) == (FindingKind.RANKS_MISSING, "n1")


def test_an_answer_that_comes_after_a_newer_hello_does_not_bring_its_workers_back() -> None:
    """On a new session Hello comes first, then the answer that was not acknowledged."""
    fleet = reporting()
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    late = prepared(fleet, "n1", 20)
    fleet.report("n1", Hello(fleet.facts("n1"), (), workers_version=21))
    fleet.report("n1", late)
    known = fleet.state.nodes["n1"]
    assert (known.workers_version, tuple(known.workers), fleet.state.live_on(known)) == (21, (), {JOB: (2,)})
    assert "n1" not in fleet.orders(Prepare), "the order is answered all the same"


def test_workers_in_the_answer_to_an_order_that_was_withdrawn_are_stopped() -> None:
    fleet = running(job(), spares=1)
    fleet.all_live()
    fleet.lose("n1")
    late = prepared(fleet, "n3", 20)
    fleet.fold(JobStopRequested(fleet.now, JOB, "asked"))
    fleet.answer_orders()
    fleet.expect(JobPhase.STOPPED)
    fleet.report("n3", late)
    assert fleet.state.nodes["n3"].workers_version == 20
    assert fleet.orders(Stop) == {"n3": Stop(JOB, 2)}


# ---------------------------------------------------------------- every report is its sender's


def test_ranks_that_a_node_does_not_run_are_not_finished_by_its_word() -> None:
    fleet = running(job(), spares=1, saved=10)
    fleet.report("n3", RanksFinished(JOB, 1, (0, 1, 2), fleet.now))
    fleet.report("n0", RanksFinished(JOB, 1, (0, 1, 2), fleet.now))
    assert fleet.job.phase is JobPhase.RUNNING
    assert "n3: ignored: it speaks of ranks of job that it does not have" in "\n".join(_notes(fleet))


def test_ranks_that_a_node_does_not_run_are_not_stepping_by_its_word() -> None:
    fleet = Fleet(3)
    fleet.submit(job())
    fleet.answer_orders()
    fleet.report("n0", RanksStepping(JOB, 1, (0, 1, 2), 1, fleet.now))
    assert fleet.job.phase is JobPhase.STARTING


def test_an_order_is_answered_only_by_the_node_that_got_it() -> None:
    fleet = Fleet(4)
    fleet.submit(job())
    theirs = next(send for send in fleet.sent if send.node == "n0")
    for sender in ("n1", "n3"):
        fleet.report(sender, OrderDone(theirs.command_id, True, "", "evil:1", fleet.now))
    assert "n0" in fleet.orders(Prepare)
    assert isinstance(fleet.job.doing, Preparing)
    assert fleet.job.doing.master == ""
    fleet.run()
    assert fleet.job.phase is JobPhase.RUNNING
    assert fleet.state.nodes["n3"].state is NodeState.SPARE


def test_the_id_of_an_order_cannot_be_guessed_from_others() -> None:
    ids = []
    for secret in ("one", "another"):
        fleet = Fleet(3)
        fleet.fold(LeaderStarted(fleet.now, 2, secret))
        fleet.submit(job())
        ids.append([send.command_id for send in fleet.sent])
    assert not set(ids[0]) & set(ids[1])
    assert len({each.rpartition(".")[2] for each in ids[0]}) == len(ids[0])


def _notes(fleet: Fleet) -> list[str]:
    return [f"{record.subject}: {record.text}" for record in fleet.records if isinstance(record, Noted)]
