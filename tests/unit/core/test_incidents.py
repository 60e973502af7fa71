"""Findings become incidents: which are expired, which are cascading, which are attributed to nobody, and what is decided."""

from __future__ import annotations

from typing import Any

import pytest
from fleet import JOB, Fleet, job, running

from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.incidents import Action, ActionKind, IncidentState
from holdfast.domain.nodes import NodeState
from holdfast.domain.orders import Prepare
from holdfast.policy import notify, restart, scale_up, stop
from holdfast.supervisor.core.model.lifecycle import Failed
from holdfast.supervisor.protocol import (
    BreakerResetRequested,
    FindingArrived,
    JobPhase,
    NodeRepaired,
    StepsCompleted,
)


def kinds(fleet: Fleet) -> list[ActionKind]:
    return [incident.action.kind for incident in fleet.state.closed if incident.action is not None]


# ---------------------------------------------------------------- expired findings


def test_an_old_finding_about_something_else_than_what_runs_is_history() -> None:
    fleet = running(job(dp=2))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1, generation=7, age_s=301)
    assert not fleet.state.incidents
    assert "301 s old" in fleet.notes()


def test_a_late_finding_about_the_running_generation_counts() -> None:
    """The log, or the supervisor, was away for longer than findings are valid."""
    fleet = running(job(dp=2))
    fleet.wait(3600.0)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1, age_s=3500.0)
    assert (fleet.incident.kind, fleet.incident.node) == (FindingKind.WORKER_CRASH, "n1")
    assert fleet.job.phase is JobPhase.PREPARING


@pytest.mark.parametrize("clock_s", [-3600.0, 3600.0])
def test_a_finding_is_dated_by_its_age_and_not_by_its_publishers_clock(clock_s: float) -> None:
    fleet = running(job(dp=2))
    fleet.wait(7200.0)
    published = Finding(
        id="f",
        kind=FindingKind.WORKER_CRASH,
        severity=Severity.ERROR,
        at=fleet.now + clock_s,
        since=fleet.now + clock_s - 0.25,
        summary="a crash",
        node="n1",
        job=JOB,
        generation=1,
        rank=1,
    )
    fleet.fold(FindingArrived(fleet.now, published, 0.5))
    assert fleet.incident.detected_at == pytest.approx(fleet.now - 0.5)
    assert fleet.incident.fault_at == pytest.approx(fleet.now - 0.75)
    assert fleet.job.phase is JobPhase.PREPARING


def test_a_step_that_ended_before_the_loss_does_not_contradict_it_whatever_its_clock_says() -> None:
    """An agent's clock is an hour ahead: its last steps, reported after the loss, are older than the loss."""
    fleet = running(job(dp=3), spares=1, decide=False)
    fleet.lose("n1")
    fleet.now += 0.5
    fleet.fold(StepsCompleted(fleet.now, JOB, 1, 4, fleet.now + 3600.0, 10, 0.1))
    assert fleet.incident.state is IncidentState.OPEN


def test_a_finding_about_an_older_generation_is_history() -> None:
    fleet = running(job(dp=2))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    fleet.find(FindingKind.WORKER_CRASH, "n0", rank=0, generation=1)
    assert not fleet.state.incidents
    assert "generation 1 of job is history" in fleet.notes()


def test_a_warning_is_noted() -> None:
    fleet = running(job(dp=2))
    fleet.find(FindingKind.HOST_PRESSURE, "n1", severity=Severity.WARNING)
    assert not fleet.state.incidents
    assert "host_pressure on n1" in fleet.notes()


def test_a_finding_that_is_delivered_twice_is_one_incident() -> None:
    fleet = running(job(dp=2))
    finding = fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.fold(FindingArrived(fleet.now, finding))
    fleet.run()
    fleet.fold(FindingArrived(fleet.now, finding))
    assert fleet.state.incidents_opened == 1
    assert fleet.job.number == 2


# ---------------------------------------------------------------- one root


def test_peers_errors_of_the_same_generation_are_cascade() -> None:
    fleet = running(job(dp=3), decide=False)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.find(FindingKind.WORKER_EXCEPTION, "n0", rank=0)
    assert fleet.state.incidents_opened == 1
    assert (fleet.incident.rank, fleet.incident.findings) == (1, ("f1", "f2"))


def test_a_finding_that_supersedes_corrects_the_root() -> None:
    fleet = running(job(dp=3), decide=False)
    fleet.find(FindingKind.WORKER_EXCEPTION, "n0", rank=0)
    fleet.find(FindingKind.WORKER_CRASH, "n2", rank=2, supersedes="f1")
    assert (fleet.incident.rank, fleet.incident.kind) == (2, FindingKind.WORKER_CRASH)
    assert fleet.incident.findings == ("f2", "f1")


def test_a_lost_node_is_the_root_of_the_worker_fault_that_it_caused() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.find(FindingKind.WORKER_EXCEPTION, "n0", rank=0)
    assert fleet.incident.action is not None
    assert fleet.incident.action.kind is ActionKind.RESTART
    fleet.lose("n1")
    assert fleet.state.incidents_opened == 1
    assert (fleet.incident.kind, fleet.incident.node) == (FindingKind.NODE_LOST, "n1")
    assert fleet.nodes() == ("n0", "n3", "n2")
    fleet.run()
    assert kinds(fleet) == [ActionKind.HOT_SWAP]


def test_a_second_fault_during_a_change_is_an_incident_of_its_own_and_both_close_together() -> None:
    fleet = running(job(dp=3), spares=2)
    fleet.lose("n0")
    fleet.now += 5
    fleet.lose("n1")
    assert fleet.state.incidents_opened == 2
    assert fleet.nodes() == ("n3", "n4", "n2")
    fleet.run()
    assert [incident.state for incident in fleet.state.closed] == [IncidentState.RESOLVED] * 2
    assert {incident.new_generation for incident in fleet.state.closed} == {fleet.job.number}


def test_a_fault_of_a_node_that_leaves_anyway_changes_nothing() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.find(FindingKind.GPU_ERROR, "n1", severity=Severity.FATAL)
    number = fleet.job.number
    fleet.find(FindingKind.GPU_ERROR, "n1", severity=Severity.FATAL)
    assert fleet.job.number == number
    assert fleet.state.incidents_opened == 1


# ---------------------------------------------------------------- two witnesses


def test_a_lost_node_needs_two_witnesses() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.find(FindingKind.NODE_LOST, "n1")
    assert not fleet.state.incidents
    assert "contradicted" in fleet.notes()
    fleet.gone("n1")
    assert fleet.incident.kind == FindingKind.NODE_LOST
    assert fleet.state.nodes["n1"].state is NodeState.LOST


def test_a_broken_session_alone_stops_nothing() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.gone("n0", "n1", "n2")
    fleet.wait(600)
    assert fleet.job.phase is JobPhase.RUNNING
    assert not fleet.state.incidents
    assert fleet.state.nodes["n1"].state is NodeState.ACTIVE


def test_a_suspicion_from_long_ago_gives_the_session_time_to_come_back() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.find(FindingKind.NODE_LOST, "n1")
    fleet.wait(60)
    fleet.gone("n1")
    assert not fleet.state.incidents
    fleet.hello("n1", running=1)
    fleet.wait(5)
    assert not fleet.state.incidents
    fleet.gone("n1")
    fleet.wait(2.1)
    assert fleet.incident.kind == FindingKind.NODE_LOST


def test_steps_that_go_on_clear_the_suspicion() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.find(FindingKind.NODE_LOST, "n1")
    fleet.wait(3.0)
    fleet.train(5)
    assert fleet.state.nodes["n1"].suspicion is None
    fleet.gone("n1")
    fleet.wait(10)
    assert not fleet.state.incidents


def test_a_new_incarnation_of_an_active_node_is_an_incident_by_itself() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.gone("n1")
    fleet.connect("n1")
    assert fleet.incident.kind == FindingKind.NODE_LOST
    assert fleet.incident.action is not None
    assert fleet.incident.action.kind is ActionKind.RESTART
    assert fleet.nodes() == ("n0", "n1", "n2")


def test_a_node_that_never_connected_cannot_be_lost() -> None:
    fleet = running(job(dp=2))
    fleet.find(FindingKind.NODE_LOST, "n9")
    assert not fleet.state.incidents
    assert "has never connected" in fleet.notes()


# ---------------------------------------------------------------- hardware


def test_a_fatal_finding_cordons_its_node_until_it_is_repaired() -> None:
    fleet = running(job(dp=3), spares=1)
    finding = fleet.find(FindingKind.GPU_ERROR, "n1", severity=Severity.FATAL)
    assert fleet.state.nodes["n1"].state is NodeState.CORDONED
    fleet.run()
    spares = fleet.view.spares
    assert spares == ()
    fleet.now += 10
    fleet.fold(NodeRepaired(fleet.now, "n1"))
    assert fleet.view.spares == ("n1",)
    fleet.fold(FindingArrived(fleet.now, finding))
    assert fleet.view.spares == ("n1",), "what was found before the repair is history"


def test_a_fatal_finding_on_a_spare_takes_it_out_without_an_incident() -> None:
    fleet = running(job(dp=2), spares=1)
    fleet.find(FindingKind.GPU_ERROR, "n2", severity=Severity.FATAL, generation=0)
    assert not fleet.state.incidents
    assert fleet.view.spares == ()


# ---------------------------------------------------------------- decisions


def test_an_answer_that_cannot_be_carried_out_is_replaced_by_the_default_with_the_reason() -> None:
    fleet = running(job(dp=2), decide=False)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.answer(scale_up("more"), "policy.py")
    assert fleet.incident.action is not None
    assert fleet.incident.action.kind is ActionKind.RESTART
    assert "policy.py answered scale_up" in fleet.incident.decided_by


def test_to_notify_only_would_leave_a_dead_run_dead() -> None:
    fleet = running(job(dp=2), decide=False)
    fleet.find(FindingKind.HANG, "n1", rank=1)
    fleet.answer(notify("look at this"), "policy.py")
    assert fleet.incident.action is not None
    assert fleet.incident.action.kind is ActionKind.RESTART


def test_an_answer_without_a_reason_is_not_accepted() -> None:
    fleet = running(job(dp=2), decide=False)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.answer(Action(ActionKind.STOP, ""), "policy.py")
    assert fleet.job.phase is JobPhase.PREPARING


def test_the_default_decides_when_no_answer_comes() -> None:
    fleet = running(job(dp=2), decide=False)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.questions.clear()
    fleet.wait(5.1)
    assert fleet.job.phase is JobPhase.PREPARING
    assert "no answer" in fleet.incident.decided_by


def test_a_late_answer_is_ignored() -> None:
    fleet = running(job(dp=2), decide=False)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    question = fleet.questions[0]
    fleet.answer(restart("again"))
    fleet.questions.append(question)
    fleet.answer(stop("too late"))
    assert fleet.job.phase is JobPhase.PREPARING


def test_stop_ends_the_job_and_its_incident_as_failed() -> None:
    fleet = running(job(dp=2))
    fleet.find(FindingKind.REPEATED_EXCEPTION, "n1", rank=1)
    assert fleet.job.phase is JobPhase.FAILED
    assert fleet.incident.state is IncidentState.FAILED
    assert fleet.job.reason == "repeated_exception on n1"


@pytest.mark.parametrize(
    ("kind", "evidence", "permanent"),
    [
        (FindingKind.REPEATED_EXCEPTION, {}, True),
        (FindingKind.WORKER_EXCEPTION, {"blame": "user", "error_class": "script"}, True),
        (FindingKind.WORKER_EXCEPTION, {"blame": "user", "error_class": "storage"}, False),
        (FindingKind.REPEATED_EXCEPTION, {"error_class": "service"}, False),
        (FindingKind.WORKER_CRASH, {"blame": "hardware"}, False),
        (FindingKind.HANG, {}, False),
    ],
)
def test_a_job_that_failed_says_whether_another_attempt_would_too(
    kind: FindingKind, evidence: dict[str, Any], permanent: bool
) -> None:
    fleet = running(job(dp=2), decide=False)
    fleet.find(kind, "n1", rank=1, **evidence)
    fleet.answer(stop("enough"))
    assert fleet.job.doing == Failed(permanent)


def test_a_repeated_exception_stops_even_what_was_decided_for_the_plain_one() -> None:
    fleet = running(job(dp=2))
    fleet.find(FindingKind.WORKER_EXCEPTION, "n1", rank=1)
    fleet.find(FindingKind.REPEATED_EXCEPTION, "n1", rank=1, generation=1, supersedes="f1")
    assert fleet.job.phase is JobPhase.FAILED


# ---------------------------------------------------------------- dates


def test_a_fault_of_the_running_generation_began_after_its_start_whatever_a_node_s_clock_says() -> None:
    fleet = running(job(dp=2), saved=10)
    started_at = fleet.job.membership.running_at
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1, since=fleet.now - 3600.0)
    assert fleet.incident.fault_at == started_at
    assert fleet.incident.evidence["dated"].startswith(
        "estimate: the start of the generation; n1 dated it 3600 s before"
    )


def test_what_is_dated_by_the_supervisor_itself_is_called_an_estimate() -> None:
    fleet = running(job(dp=2, first_step_timeout_s=20))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.answer_orders()
    fleet.wait(21)
    assert fleet.incident.kind == FindingKind.RANKS_MISSING
    assert fleet.incident.evidence["dated"].startswith("estimate: the start of the generation")


# ---------------------------------------------------------------- the breaker


def test_too_many_lost_nodes_at_once_open_the_breaker_and_nothing_is_stopped() -> None:
    fleet = running(job(dp=8, min_dp=1))
    fleet.gone(*(f"n{index}" for index in range(4)))
    for index in range(4):
        fleet.find(FindingKind.NODE_LOST, f"n{index}")
    assert fleet.state.breaker.open_until is not None
    number = fleet.job.number
    fleet.find(FindingKind.WORKER_CRASH, "n6", rank=6)
    assert fleet.job.number == number
    assert "while the breaker is open" in fleet.notes()


def test_nodes_that_come_back_with_their_workers_were_never_lost() -> None:
    fleet = running(job(dp=8, min_dp=8))
    names = [f"n{index}" for index in range(8)]
    fleet.decide = False
    fleet.gone(*names)
    for name in names:
        fleet.find(FindingKind.NODE_LOST, name, name=name)
    assert fleet.state.breaker.open_until is not None
    for name in names:
        fleet.hello(name, running=1)
    assert not fleet.orders(Prepare)
    assert [incident.outcome for incident in fleet.state.closed if "nothing was lost" in incident.outcome]


def test_a_node_that_really_was_gone_casts_no_doubt_on_the_next_loss() -> None:
    """Three machines of a small fleet reboot, one after the other."""
    fleet = running(job(dp=4, min_dp=1), spares=1)
    for name in ("n0", "n1", "n2"):
        fleet.lose(name)
        fleet.run()
        fleet.connect(name)
        assert fleet.state.breaker.failed_nodes == ()
    assert fleet.state.breaker.open_until is None
    assert fleet.job.phase is JobPhase.RUNNING


def test_nodes_that_start_again_prove_the_view_right_and_close_the_breaker() -> None:
    fleet = running(job(dp=8, min_dp=1))
    changes = fleet.state.breaker.changes
    fleet.gone(*(f"n{index}" for index in range(4)))
    for index in range(4):
        fleet.find(FindingKind.NODE_LOST, f"n{index}")
    until = fleet.state.breaker.open_until
    assert until is not None
    fleet.connect("n0")
    fleet.connect("n1")
    assert fleet.state.breaker.open_until is None
    assert [name for _, name in fleet.state.breaker.failed_nodes] == ["n2", "n3"]
    assert fleet.state.breaker.changes[: len(changes)] == changes
    fleet.run()
    assert fleet.job.phase is JobPhase.RUNNING


def test_an_operator_closes_the_breaker_and_the_incident_is_decided() -> None:
    fleet = running(job(dp=8, min_dp=1))
    fleet.gone(*(f"n{index}" for index in range(4)))
    for index in range(4):
        fleet.find(FindingKind.NODE_LOST, f"n{index}")
    fleet.fold(BreakerResetRequested(fleet.now, "the switch was replaced"))
    while fleet.questions:
        fleet.answer()
    assert fleet.job.generation is not None
    assert fleet.job.generation.mesh.dp == 4
