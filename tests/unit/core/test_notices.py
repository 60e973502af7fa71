"""Maintenance notices: the node leaves in time and cheaply, or stays; nothing healthy is stopped for one."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from fleet import JOB, Fleet, asked_to_end, job, running

from holdfast.domain.errors import Conflict, HoldfastError
from holdfast.domain.findings import FindingKind, Severity
from holdfast.domain.incidents import MAINTENANCE, Action, ActionKind, IncidentState
from holdfast.domain.nodes import TERMINATION, NodeState
from holdfast.domain.orders import CheckpointNow, Prepare, Stop
from holdfast.policy import MAINTENANCE_LEAD_S
from holdfast.supervisor.core import check_notice
from holdfast.supervisor.core.handling.notices import SOURCES_MAX, TOGETHER_S
from holdfast.supervisor.protocol import IncidentChanged, JobPhase, LeaderStarted, NodeCordonRequested, NoticeRequested

HOUR_S = 3600.0


def notice(fleet: Fleet, node: str, starts_s: float | None = HOUR_S, source: str = "file") -> None:
    fleet.now += 0.01
    starts: dict[str, Any] = {} if starts_s is None else {"starts_at": f"{fleet.now + starts_s:.0f}"}
    fleet.find(FindingKind.MAINTENANCE, node, severity=Severity.WARNING, source=source, event="reboot", **starts)


def withdraw(fleet: Fleet, node: str, source: str = "file") -> None:
    fleet.now += 0.01
    fleet.find(FindingKind.MAINTENANCE, node, severity=Severity.INFO, source=source, withdraws="it")


def save_asked_for(fleet: Fleet) -> int:
    """Every rank gets to the step that was asked for, and saves it."""
    order = fleet.orders(CheckpointNow)["n0"]
    assert isinstance(order, CheckpointNow)
    assert order.to_object_store
    fleet.train(order.at_step, save=True)
    return order.at_step


def test_a_spare_takes_the_ranks_at_a_checkpoint_and_no_step_is_done_again() -> None:
    fleet = running(job(dp=3), spares=1, saved=10)
    fleet.train(12)
    notice(fleet, "n1")
    assert fleet.job.phase is JobPhase.RUNNING
    assert fleet.incident.kind == MAINTENANCE
    assert fleet.incident.evidence["event"] == "reboot"
    save_asked_for(fleet)
    fleet.run()
    assert fleet.nodes() == ("n0", "n3", "n2")
    incident = fleet.incident
    assert incident.action is not None
    assert incident.action.kind is ActionKind.HOT_SWAP
    assert (incident.rework_steps, incident.state) == (0, IncidentState.RESOLVED)
    assert fleet.state.nodes["n1"].state is NodeState.CORDONED
    assert fleet.view.spares == (), "a machine that will be taken is nobody's spare"


def test_a_new_leader_hears_of_the_save_before_it_concludes_that_none_came() -> None:
    fleet = running(job(dp=3), spares=1, saved=10)
    fleet.train(12)
    notice(fleet, "n1")
    order = fleet.orders(CheckpointNow)["n0"]
    assert isinstance(order, CheckpointNow)
    fleet.train(order.at_step)  # all of it was saved, but no leader was there to receive the report
    fleet.now += fleet.state.config.save_s + 1.0
    fleet.fold(LeaderStarted(fleet.now, 2))
    fleet.wait(1.0)
    assert fleet.job.planned is not None, "the swap still waits for its checkpoint"
    fleet.save(order.at_step)
    fleet.run()
    assert fleet.nodes() == ("n0", "n3", "n2")
    assert fleet.incident.rework_steps == 0


def test_how_far_the_save_came_can_be_read() -> None:
    fleet = running(job(dp=2, min_dp=2), saved=10)
    notice(fleet, "n1", 30.0)
    step = save_asked_for(fleet)
    fleet.wait(31.0)
    assert f"step {step} of job is saved: memory (all of 2 ranks)" in fleet.notes()


def test_without_a_spare_the_replica_leaves_when_its_time_is_near_and_not_before() -> None:
    fleet = running(job(dp=3), saved=10)
    notice(fleet, "n1")
    assert fleet.incident.state is IncidentState.RESOLVED
    assert "waiting for one" in fleet.incident.outcome
    save_asked_for(fleet)
    fleet.answer_orders()
    fleet.wait(HOUR_S - MAINTENANCE_LEAD_S - 10.0)
    assert fleet.job.phase is JobPhase.RUNNING
    assert not fleet.orders(CheckpointNow)
    fleet.train(400)
    fleet.wait(11.0)
    save_asked_for(fleet)
    fleet.run()
    assert fleet.nodes() == ("n0", "n2")
    assert fleet.incident.rework_steps == 0


def test_a_spare_that_comes_in_time_is_taken() -> None:
    fleet = running(job(dp=3), saved=10)
    notice(fleet, "n1")
    save_asked_for(fleet)
    fleet.answer_orders()
    fleet.train(60)
    fleet.connect("n3")
    save_asked_for(fleet)
    fleet.run()
    assert fleet.nodes() == ("n0", "n3", "n2")


@pytest.mark.parametrize("starts_s", [None, 10.0, HOUR_S])
def test_with_no_replica_to_spare_the_run_goes_on_until_the_machine_goes(starts_s: float | None) -> None:
    fleet = running(job(dp=2, min_dp=2), saved=10)
    notice(fleet, "n1", starts_s)
    save_asked_for(fleet)
    fleet.answer_orders()
    fleet.wait(2 * HOUR_S)
    assert fleet.job.phase is JobPhase.RUNNING
    assert fleet.nodes() == ("n0", "n1")
    assert not fleet.state.incidents
    assert not fleet.orders(Stop)


def test_when_nobody_says_when_the_replica_leaves_at_once() -> None:
    fleet = running(job(dp=3), saved=10)
    fleet.train(12)
    notice(fleet, "n1", None)
    save_asked_for(fleet)
    fleet.run()
    assert fleet.nodes() == ("n0", "n2")


def test_a_withdrawn_notice_changes_nothing_any_more() -> None:
    fleet = running(job(dp=3), spares=1, saved=10)
    fleet.train(12)
    notice(fleet, "n1")
    withdraw(fleet, "n1")
    assert fleet.incident.outcome == "the maintenance of n1 is off"
    save_asked_for(fleet)
    assert not fleet.orders(Prepare)
    assert fleet.nodes() == ("n0", "n1", "n2")


def test_one_source_does_not_take_back_what_another_announces() -> None:
    fleet = running(job(dp=2), spares=1)
    notice(fleet, "n2")
    notice(fleet, "n2", source="gce")
    withdraw(fleet, "n2")
    before = fleet.state.nodes["n2"].state
    assert before is NodeState.CORDONED
    withdraw(fleet, "n2", source="gce")
    assert fleet.state.nodes["n2"].state is NodeState.SPARE


def test_a_notice_that_is_said_again_after_its_withdrawal_stays_withdrawn() -> None:
    fleet = running(job(dp=2), spares=1)
    late = fleet.now
    withdraw(fleet, "n2")
    fleet.find(
        FindingKind.MAINTENANCE, "n2", severity=Severity.WARNING, source="file", event="reboot", age_s=fleet.now - late
    )
    assert fleet.view.spares == ("n2",)


def test_of_two_nodes_the_spare_goes_to_the_one_that_is_taken_first() -> None:
    fleet = running(job(dp=3), spares=1, saved=10)
    fleet.decide = False
    notice(fleet, "n2", HOUR_S)
    notice(fleet, "n0", HOUR_S / 2)
    while fleet.questions:
        fleet.answer()
    assert fleet.incident.action is not None
    assert fleet.incident.action.nodes == ("n0",)


def test_a_restart_for_another_reason_keeps_a_node_that_has_no_replacement() -> None:
    fleet = running(job(dp=2, min_dp=2), saved=10)
    notice(fleet, "n1")
    fleet.answer_orders()
    fleet.find(FindingKind.WORKER_CRASH, "n0", rank=0)
    fleet.run()
    assert fleet.nodes() == ("n0", "n1")


def test_a_script_that_cannot_be_saved_leaves_as_late_as_possible() -> None:
    fleet = Fleet(3)
    fleet.submit(job(dp=2))
    fleet.now += 0.1
    fleet.answer_orders()
    fleet.step_all(0)  # it reports no steps
    notice(fleet, "n1", None)
    assert not fleet.state.incidents
    notice(fleet, "n1")
    assert not fleet.state.incidents
    fleet.wait(HOUR_S - MAINTENANCE_LEAD_S + 1.0)
    assert set(fleet.orders(Prepare)) == {"n0", "n2"}


def test_a_spare_that_goes_before_the_swap_does_not_stop_the_run() -> None:
    fleet = running(job(dp=2, min_dp=2), spares=1, saved=10)
    fleet.train(12)
    notice(fleet, "n1")
    fleet.fold(NodeCordonRequested(fleet.now, "n2", True, "new firmware"))
    save_asked_for(fleet)
    assert fleet.job.phase is JobPhase.RUNNING
    assert not fleet.orders(Stop)


@pytest.mark.parametrize("kind", [ActionKind.RESTART, ActionKind.SCALE_UP])
def test_maintenance_action_that_keeps_the_node_counts_as_no_action(kind: ActionKind) -> None:
    fleet = running(job(dp=3), spares=1, saved=10)
    fleet.decide = False
    notice(fleet, "n1")
    fleet.answer(Action(kind, "a whim"), "policy.py")
    assert fleet.incident.action is not None
    assert fleet.incident.action.kind is ActionKind.HOT_SWAP
    assert "keeps n1, whose maintenance" in fleet.incident.decided_by


def test_a_policy_may_let_it_stay() -> None:
    fleet = running(job(dp=3), spares=1, saved=10)
    fleet.decide = False
    notice(fleet, "n1")
    fleet.answer(Action(ActionKind.NOTIFY, "live migration does not hurt us"), "policy.py")
    fleet.train(30)
    assert fleet.incident.outcome == "n1 keeps its ranks: live migration does not hurt us"
    assert not fleet.questions
    assert fleet.state.jobs[JOB].deferred_evictions


# ---------------------------------------------------------------- an agent that was asked to end


def test_the_notice_of_an_agent_that_was_asked_to_end_is_over_when_one_starts_there() -> None:
    fleet = running(job(dp=2, min_dp=2), spares=0, saved=10)
    asked_to_end(fleet, "n1")
    life = fleet.state.nodes["n1"].facts.incarnation
    notice(fleet, "n1", HOUR_S, "file")
    assert {each.source for each in fleet.state.nodes["n1"].notices if each.event} == {TERMINATION, "file"}
    fleet.gone("n1")
    fleet.now += 1.0
    fleet.connect("n1")
    asked_to_end(fleet, "n1", life)  # underway since before
    assert {each.source for each in fleet.state.nodes["n1"].notices if each.event} == {"file"}


def test_an_allocation_that_ends_as_a_whole_is_saved_and_not_swapped_node_by_node() -> None:
    """Every node has a notice within a second, and nobody is left to go to: one answer for all."""
    fleet = running(job(dp=6, min_dp=6), saved=10)
    for name in fleet.nodes():
        asked_to_end(fleet, name)
    number = fleet.job.number
    assert not fleet.orders(CheckpointNow), "more may follow"
    fleet.wait(TOGETHER_S)
    save_asked_for(fleet)
    answers = [each.incident for each in fleet.records if isinstance(each, IncidentChanged) and each.incident.closed]
    (incident,) = (each for each in answers if each.kind == MAINTENANCE)
    assert incident.action is not None
    assert incident.action.kind is ActionKind.WAIT
    fleet.answer_orders()
    fleet.wait(20.0)
    assert (fleet.job.phase, fleet.job.number) == (JobPhase.SUSPENDED, number)
    assert fleet.state.breaker.open_until is None


def announce(
    fleet: Fleet, node: str, event: str = "drain", starts_s: float | None = HOUR_S, source: str = "slurm"
) -> None:
    """By the API."""
    fleet.now += 0.01
    starts_at = None if starts_s is None else fleet.now + starts_s
    fleet.fold(NoticeRequested(fleet.now, node, source, event, starts_at if event else None))


def test_a_notice_by_the_api_moves_the_ranks_at_a_checkpoint() -> None:
    fleet = running(job(dp=3), spares=1, saved=10)
    fleet.train(12)
    announce(fleet, "n1")
    states = [fleet.state.nodes["n1"].state]
    step = save_asked_for(fleet)
    fleet.run()
    assert "n1" not in fleet.nodes()
    assert fleet.incident.restored_step == step
    assert fleet.incident.evidence["source"] == "slurm"
    states.append(fleet.state.nodes["n1"].state)
    announce(fleet, "n1", "")
    states.append(fleet.state.nodes["n1"].state)
    assert states == [NodeState.ACTIVE, NodeState.CORDONED, NodeState.SPARE]


def test_a_notice_by_the_api_is_replaced_by_its_source_and_ends_when_nobody_repeats_it() -> None:
    fleet = running(job(dp=2), spares=1, saved=10)
    announce(fleet, "n2")
    announce(fleet, "n2", "later", 2 * HOUR_S)
    assert [(each.source, each.event) for each in fleet.state.nodes["n2"].notices] == [("slurm", "later")]
    fleet.wait(2 * HOUR_S + fleet.state.config.notice_hold_s + 1)
    assert fleet.state.nodes["n2"].notice is None
    assert fleet.state.nodes["n2"].state is NodeState.SPARE


@pytest.mark.parametrize(
    ("node", "source", "event", "starts_at", "why"),
    [
        ("n9", "slurm", "drain", None, "there is no node n9"),
        ("n1", "file", "drain", None, "source"),  # the agent's own
        ("n1", TERMINATION, "drain", None, "source"),
        ("n1", "Slurm!", "drain", None, "source"),
        ("n1", "s" * 33, "drain", None, "source"),
        ("n1", "slurm", "", None, "n1 has no notice of slurm"),
        ("n1", "slurm", "x" * 501, None, "event"),
        ("n1", "slurm", "drain", -5.0, "starts_at"),
        ("n1", "slurm", "drain", math.inf, "starts_at"),
        ("n1", "slurm", "drain", math.nan, "starts_at"),
    ],
)
def test_what_a_notice_may_not_say(node: str, source: str, event: str, starts_at: float | None, why: str) -> None:
    fleet = running(job(dp=2))
    with pytest.raises(HoldfastError, match=re.escape(why)):
        check_notice(fleet.state, NoticeRequested(fleet.now, node, source, event, starts_at))


def test_a_node_does_not_collect_notices_without_end() -> None:
    fleet = running(job(dp=2), spares=1)
    for number in range(SOURCES_MAX):
        announce(fleet, "n2", source=f"s{number}")
    with pytest.raises(Conflict, match="notices of 8 sources already"):
        check_notice(fleet.state, NoticeRequested(fleet.now, "n2", "one-more", "drain"))
    check_notice(fleet.state, NoticeRequested(fleet.now, "n2", "s3", "at another time"))
