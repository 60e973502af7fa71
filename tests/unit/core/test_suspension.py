"""All nodes of a job are asked to end: it is suspended at a step that is saved, and goes on from there when nodes come."""

from __future__ import annotations

import pytest
from fleet import JOB, Fleet, asked_to_end, job, running

from holdfast.domain.findings import FindingKind
from holdfast.domain.incidents import MAINTENANCE, Action, ActionKind, IncidentState
from holdfast.domain.nodes import NodeState
from holdfast.domain.orders import CheckpointNow, Inventory, Prepare, RanksFinished, Stop
from holdfast.supervisor.core.handling.notices import TOGETHER_S
from holdfast.supervisor.core.model.lifecycle import Suspended
from holdfast.supervisor.protocol import (
    IncidentChanged,
    JobPhase,
    JobStopRequested,
    LeaderStarted,
    NodeCordonRequested,
)

GRACE_S = 25.0


def ends(fleet: Fleet, *nodes: str) -> None:
    """Agents are asked to end, all within a moment, and what is done about it begins."""
    for name in nodes or fleet.nodes():
        asked_to_end(fleet, name)
    fleet.wait(TOGETHER_S)


def saved_and_stopped(fleet: Fleet) -> int:
    step = fleet.save_asked()
    for node in list(fleet.orders(Stop)):
        fleet.done(node, Stop)
    return step


def leave(fleet: Fleet, *nodes: str) -> None:
    fleet.gone(*(nodes or fleet.nodes()))


def back(fleet: Fleet, *nodes: str, holding: int = 0) -> None:
    """New agents on the same machines, which report what their disks have."""
    for name in nodes:
        shards = fleet.state.nodes[name].inventory.get(JOB, ())
        fleet.connect(name)
        if holding:
            fleet.report(name, Inventory(JOB, tuple(each for each in shards if each.key.step <= holding)))


def suspended(fleet: Fleet) -> Suspended:
    assert isinstance(fleet.job.doing, Suspended), fleet.job
    return fleet.job.doing


def test_an_allocation_ends_and_another_begins_and_no_step_is_done_again() -> None:
    fleet = running(job(dp=3), saved=10)
    fleet.train(12)
    ends(fleet)
    fleet.expect(JobPhase.STOPPING)
    assert "saving at step" in fleet.job.reason
    step = saved_and_stopped(fleet)
    assert step > 12
    assert (fleet.job.phase, suspended(fleet).step) == (JobPhase.SUSPENDED, step)
    assert fleet.job.reason == (
        f"all of its nodes were asked to end; it goes on from step {step} when nodes are there again"
    )
    assert fleet.incident.kind == MAINTENANCE
    assert fleet.incident.outcome == "all nodes of the job leave: it is suspended"
    leave(fleet)
    fleet.wait(3600.0)
    assert suspended(fleet).step == step
    back(fleet, "n0", "n1", "n2", holding=step)
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == step
    assert f"of suspension, which began at step {step}" in fleet.notes()
    assert not fleet.state.incidents


@pytest.mark.parametrize("apart_s", [0.002, TOGETHER_S / 2])
def test_the_end_of_an_allocation_is_one_incident_whichever_node_is_heard_first(apart_s: float) -> None:
    """The agent whose notice arrives second got its signal first: its grace ends a moment earlier."""
    fleet = running(job(dp=2), saved=10, decide=False)
    asked_to_end(fleet, "n1", grace_s=GRACE_S)
    asked_to_end(fleet, "n0", grace_s=GRACE_S - 2 * apart_s, after_s=apart_s)
    fleet.wait(TOGETHER_S - apart_s)  # the first has waited for the others, the second has not yet
    (asked,) = fleet.state.incidents
    fleet.wait(apart_s)
    assert list(fleet.state.incidents) == [asked]
    fleet.answer()
    fleet.expect(JobPhase.STOPPING)
    saved_and_stopped(fleet)
    kinds = {each.incident.id: each.incident.kind for each in fleet.records if isinstance(each, IncidentChanged)}
    assert kinds == {asked: MAINTENANCE}


def test_workers_end_before_the_grace_does_when_no_save_comes() -> None:
    fleet = running(job(dp=2), saved=10)
    fleet.train(12)
    ends(fleet)
    assert not fleet.orders(Stop)
    fleet.wait(GRACE_S - TOGETHER_S - fleet.state.config.suspend_margin_s)
    assert set(fleet.orders(Stop)) == {"n0", "n1"}
    leave(fleet)
    assert suspended(fleet).step == 10
    assert "it did not come in time" in fleet.notes()


def test_nodes_that_go_before_the_save_leave_the_job_suspended_at_the_step_before() -> None:
    fleet = running(job(dp=2), saved=10)
    ends(fleet)
    leave(fleet, "n0")
    fleet.expect(JobPhase.STOPPING)  # its session may come back
    leave(fleet, "n1")
    assert suspended(fleet).step == 10


def test_a_job_without_any_save_says_so_and_is_started_again() -> None:
    fleet = running(job(dp=2))
    ends(fleet)
    leave(fleet)
    assert suspended(fleet).step == 0
    assert "no step of it is saved" in fleet.job.reason
    back(fleet, "n0", "n1")
    fleet.run()
    fleet.expect(JobPhase.RUNNING)


def test_a_script_without_the_library_is_stopped_in_order_and_started_again() -> None:
    fleet = Fleet(2)
    fleet.submit(job(dp=2))
    fleet.now += 0.1
    fleet.answer_orders()
    fleet.step_all(0)
    ends(fleet)
    assert not fleet.orders(CheckpointNow)
    stops = fleet.orders(Stop)
    assert {name: order.grace_s for name, order in stops.items() if isinstance(order, Stop)} == {
        "n0": fleet.state.config.stop_grace_s,
        "n1": fleet.state.config.stop_grace_s,
    }
    fleet.answer_orders()
    assert suspended(fleet).step == 0
    assert "reports no steps" in fleet.job.reason
    leave(fleet)
    back(fleet, "n0", "n1")
    fleet.now += 0.1
    fleet.answer_orders()
    fleet.step_all(0)
    fleet.expect(JobPhase.RUNNING)


def test_a_long_grace_is_used_to_train() -> None:
    fleet = running(job(dp=2), saved=10)
    lead_s = fleet.state.config.notice_lead_s
    for name in fleet.nodes():
        asked_to_end(fleet, name, grace_s=lead_s + 120.0)
    fleet.wait(TOGETHER_S)
    fleet.expect(JobPhase.RUNNING)
    fleet.answer_orders()
    fleet.wait(118.0)
    fleet.expect(JobPhase.RUNNING)
    fleet.wait(2.0)
    fleet.expect(JobPhase.STOPPING)


def test_a_policy_that_wants_to_go_on_goes_on_to_the_end_and_is_suspended_then() -> None:
    fleet = running(job(dp=2), saved=10, decide=False)
    ends(fleet)
    fleet.answer(Action(ActionKind.NOTIFY, "the script saves itself"), "policy.py")
    fleet.expect(JobPhase.RUNNING)
    fleet.decide = True
    for name in ("n0", "n1"):
        fleet.lose(name)
    assert suspended(fleet).step == 10


def test_a_supervisor_that_was_away_hears_of_it_when_it_is_back() -> None:
    """Its agents have gone, and their notices wait in the log."""
    fleet = running(job(dp=2), saved=10)
    fleet.now += 60.0
    fleet.fold(LeaderStarted(fleet.now, 2))
    for name in fleet.nodes():
        asked_to_end(fleet, name)
    fleet.wait(60.0)
    assert suspended(fleet).step == 10


def test_without_a_notice_the_loss_of_all_nodes_is_no_suspension() -> None:
    fleet = running(job(dp=2), saved=10)
    for name in ("n0", "n1"):
        fleet.lose(name)
    fleet.expect(JobPhase.WAITING)


def test_a_job_that_waits_when_the_rest_of_its_nodes_is_asked_to_end_is_suspended() -> None:
    fleet = running(job(dp=2, min_dp=2), saved=10)
    fleet.lose("n1")
    fleet.expect(JobPhase.WAITING)
    asked_to_end(fleet, "n0")
    assert suspended(fleet).step == 10


def test_the_first_nodes_that_are_back_wait_for_the_others() -> None:
    fleet = running(job(dp=3, min_dp=1), saved=10)
    ends(fleet)
    step = saved_and_stopped(fleet)
    leave(fleet)
    back(fleet, "n0", "n1", holding=step)
    fleet.expect(JobPhase.SUSPENDED)
    fleet.wait(fleet.state.config.degraded_start_s - 1.0)
    fleet.expect(JobPhase.SUSPENDED)
    fleet.wait(1.1)
    assert set(fleet.orders(Prepare)) == {"n0", "n1"}


def test_other_nodes_wait_for_those_that_have_the_step() -> None:
    fleet = running(job(dp=2), saved=10)
    ends(fleet)
    step = saved_and_stopped(fleet)
    leave(fleet)
    for name in ("m0", "m1"):
        fleet.connect(name)
    fleet.wait(fleet.state.config.degraded_start_s + 1.0)
    fleet.expect(JobPhase.SUSPENDED)
    assert f"cannot restore step {step}" in fleet.job.reason
    back(fleet, "n0", "n1", holding=step)
    fleet.run()
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == step


def test_but_not_for_ever() -> None:
    fleet = running(job(dp=2), saved=10)
    ends(fleet)
    saved_and_stopped(fleet)
    leave(fleet)
    for name in ("m0", "m1"):
        fleet.connect(name)
    fleet.wait(fleet.state.config.suspended_holders_s + 0.1)
    assert set(fleet.orders(Prepare)) == {"m0", "m1"}


def test_what_was_lost_with_the_memory_of_a_machine_is_not_waited_for() -> None:
    fleet = running(job(dp=2), saved=10)
    ends(fleet)
    saved_and_stopped(fleet)
    leave(fleet)
    back(fleet, "n0", "n1", holding=10)
    fleet.run()
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == 10, "at once: both have said what they hold"


def test_nothing_begins_on_nodes_that_are_about_to_end() -> None:
    """They stay for a while for the copies of the last save."""
    fleet = running(job(dp=2, min_dp=1), saved=10)
    ends(fleet)
    saved_and_stopped(fleet)
    leave(fleet, "n1")
    back(fleet, "n1", holding=10)
    fleet.wait(fleet.state.config.suspended_holders_s + 60.0)
    assert "n0" not in fleet.orders(Prepare)


def test_a_save_that_becomes_known_later_counts() -> None:
    fleet = running(job(dp=2), saved=10)
    ends(fleet)
    order = fleet.orders(CheckpointNow)["n0"]
    assert isinstance(order, CheckpointNow)
    fleet.wait(GRACE_S)
    fleet.answer_orders()
    assert suspended(fleet).step == 10
    fleet.save(order.at_step)
    assert suspended(fleet).step == order.at_step
    assert f"it goes on from step {order.at_step}" in fleet.job.reason


@pytest.mark.parametrize("early", [True, False], ids=["while it saves", "suspended"])
def test_an_operator_may_stop_it_for_good(early: bool) -> None:
    fleet = running(job(dp=2), saved=10)
    ends(fleet)
    if not early:
        saved_and_stopped(fleet)
        fleet.expect(JobPhase.SUSPENDED)
    fleet.fold(JobStopRequested(fleet.now, JOB, "enough"))
    if early:
        saved_and_stopped(fleet)
    fleet.expect(JobPhase.STOPPED)
    assert fleet.job.reason == "enough"


def test_a_fault_while_it_saves_is_no_incident() -> None:
    fleet = running(job(dp=2), saved=10)
    ends(fleet)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert not fleet.state.incidents
    fleet.wait(GRACE_S)
    fleet.answer_orders()
    assert suspended(fleet).step == 10


def test_a_script_that_ends_while_it_is_to_save_has_completed() -> None:
    fleet = running(job(dp=2), saved=10)
    ends(fleet)
    for rank, name in enumerate(("n0", "n1")):
        fleet.report(name, RanksFinished(JOB, fleet.job.number, (rank,), fleet.now))
    fleet.expect(JobPhase.COMPLETED)


def test_a_spare_that_stays_takes_ranks_as_before() -> None:
    fleet = running(job(dp=2), spares=2, saved=10)
    ends(fleet)
    saved_step = fleet.save_asked()
    fleet.run()
    assert fleet.job.phase is JobPhase.RUNNING
    assert "n2" in fleet.nodes()
    assert saved_step > 10


def test_a_leader_that_dies_while_it_saves_is_followed_by_one_that_suspends() -> None:
    fleet = running(job(dp=2), saved=10)
    ends(fleet)
    fleet.fold(LeaderStarted(fleet.now + 0.1, 2))
    fleet.now += 0.1
    for name in ("n0", "n1"):
        fleet.hello(name)
    step = saved_and_stopped(fleet)
    assert suspended(fleet).step == step


def test_a_job_whose_agents_an_operator_wants_back_goes_on() -> None:
    """`holdfast nodes uncordon` says that the nodes may be used."""
    fleet = running(job(dp=2), saved=10)
    ends(fleet)
    step = saved_and_stopped(fleet)
    for name in ("n0", "n1"):
        fleet.fold(NodeCordonRequested(fleet.now, name, False, "it was a mistake"))
    fleet.run()
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == step
    assert fleet.incident.state is IncidentState.RESOLVED


def test_services_that_are_started_again_with_the_same_state_go_on_with_it() -> None:
    fleet = running(job(dp=2), saved=10)
    ends(fleet)
    step = saved_and_stopped(fleet)
    leave(fleet)
    fleet.now += 86_400.0
    fleet.fold(LeaderStarted(fleet.now, 2))
    assert suspended(fleet).step == step
    back(fleet, "n0", "n1", holding=step)
    fleet.run()
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == step


def test_nodes_that_left_on_request_are_not_held_down_nor_counted() -> None:
    fleet = running(job(dp=4, min_dp=4), saved=10)
    for _ in range(3):
        ends(fleet)
        step = saved_and_stopped(fleet)
        for name in fleet.nodes():
            fleet.lose(name)
            assert fleet.state.nodes[name].state is NodeState.LEFT
        assert suspended(fleet).step == step
        assert fleet.state.breaker.open_until is None
        back(fleet, *fleet.nodes(), holding=step)
        fleet.run()
        fleet.expect(JobPhase.RUNNING)
        fleet.train(step + 20)
    assert not any(node.faults or node.removal for node in fleet.state.nodes.values())
