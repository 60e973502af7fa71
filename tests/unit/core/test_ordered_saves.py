"""All ranks agree on a save before they make it. What waits for the save follows the step that they agree on."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from fleet import JOB, Fleet, job, running, warn_of_a_slow_node

from holdfast.domain.nodes import NodeFacts
from holdfast.domain.orders import CheckpointNow, OrderDone, Prepare, SaveStage, SetInterval
from holdfast.policy import set_interval
from holdfast.supervisor.core.model.lifecycle import Saving, Stopping
from holdfast.supervisor.protocol import (
    CheckpointRequested,
    JobPhase,
    JobStopRequested,
    ResizeRequested,
    StepsCompleted,
)
from holdfast.supervisor.timers import StopTimeout

NODES = {"n0", "n1", "n2"}


class Older(Fleet):
    """One agent is of an earlier version."""

    def facts(self, node: str, zone: str = "", capacity: int = 1) -> NodeFacts:
        facts = super().facts(node, zone, capacity)
        return replace(facts, agrees_on_saves=node != "n1")


def orders(fleet: Fleet, stage: SaveStage) -> dict[str, int]:
    """The steps of the unanswered orders of this stage, by node."""
    found = [(send.node, send.order) for send in fleet.sent if isinstance(send.order, CheckpointNow)]
    return {node: order.at_step for node, order in found if order.stage == stage}


def answer(fleet: Fleet, node: str, stage: SaveStage, *, ok: bool = True, reason: str = "") -> None:
    send = next(
        each
        for each in fleet.sent
        if each.node == node and isinstance(each.order, CheckpointNow) and each.order.stage == stage
    )
    fleet.report(node, OrderDone(send.command_id, ok, reason, "", fleet.now))


def stopping(kind: type[Fleet] = Fleet) -> Fleet:
    fleet = running(job(dp=3), saved=20, kind=kind)
    fleet.fold(JobStopRequested(fleet.now, JOB, "seen enough", save=True))
    return fleet


def test_nobody_saves_before_all_nodes_have_agreed() -> None:
    fleet = stopping()
    proposed = orders(fleet, SaveStage.PROPOSED)
    assert proposed.keys() == NODES
    for node in ("n0", "n1"):
        answer(fleet, node, SaveStage.PROPOSED)
        assert not orders(fleet, SaveStage.AGREED)
    answer(fleet, "n2", SaveStage.PROPOSED)
    assert orders(fleet, SaveStage.AGREED) == proposed, "the same step, on every node"


def test_an_answer_that_is_repeated_counts_once() -> None:
    fleet = stopping()
    send = next(each for each in fleet.sent if each.node == "n0")
    for _ in range(3):
        fleet.report("n0", OrderDone(send.command_id, True, "", "", fleet.now))
    assert not orders(fleet, SaveStage.AGREED)


def test_if_a_rank_has_passed_the_step_nobody_saves_and_a_later_step_is_proposed() -> None:
    fleet = stopping()
    first = orders(fleet, SaveStage.PROPOSED)["n0"]
    answer(fleet, "n0", SaveStage.PROPOSED)
    answer(fleet, "n1", SaveStage.PROPOSED, ok=False, reason=f"rank 1 of job has passed step {first}")
    assert set(orders(fleet, SaveStage.VOID).items()) == {(node, first) for node in NODES}
    assert not orders(fleet, SaveStage.AGREED)
    second = orders(fleet, SaveStage.PROPOSED)
    assert second.keys() == NODES
    assert min(second.values()) > first
    assert isinstance(fleet.job.doing, Saving)
    assert fleet.job.doing.at_step == second["n0"], "the stop waits for the later step"
    for node in sorted(NODES):
        answer(fleet, node, SaveStage.PROPOSED)
    assert orders(fleet, SaveStage.AGREED) == second
    fleet.train(first, save=True)
    assert fleet.job.phase is JobPhase.STOPPING
    assert isinstance(fleet.job.doing, Saving), (
        "the interval may save the first step: it is not the one that was agreed"
    )
    fleet.train(second["n0"], save=True)
    assert not isinstance(fleet.job.doing, Saving)


def test_a_node_that_had_not_received_a_void_proposal_never_does() -> None:
    """It would bind its ranks to a result that does not come."""
    fleet = stopping()
    answer(fleet, "n1", SaveStage.PROPOSED, ok=False, reason="passed")
    waiting = [send.order for send in fleet.state.outbox.values() if isinstance(send.order, CheckpointNow)]
    assert {order.at_step for order in waiting if order.stage == SaveStage.PROPOSED} == {
        orders(fleet, SaveStage.PROPOSED)["n0"]
    }


def test_each_proposal_is_farther_ahead_and_their_number_is_limited() -> None:
    fleet = running(job(dp=1), spares=1, saved=20)
    fleet.fold(CheckpointRequested(fleet.now, JOB, "op-1"))
    steps = []
    while proposed := orders(fleet, SaveStage.PROPOSED):
        steps.append(proposed["n0"])
        answer(fleet, "n0", SaveStage.PROPOSED, ok=False, reason="passed")
        assert len(steps) < 10
    ahead = [after - before for before, after in itertools.pairwise(steps)]
    assert len(steps) == 4
    assert ahead == sorted(ahead)
    assert ahead[-1] >= 3 * ahead[0]
    assert not fleet.answers
    (request,) = fleet.job.checkpoints.requests
    assert request.at_step == steps[-1]


def test_the_planned_change_begins_with_the_step_that_was_agreed() -> None:
    fleet = running(job(dp=2), spares=1, saved=20)
    fleet.fold(ResizeRequested(fleet.now, JOB, 1, "for a while"))
    first = orders(fleet, SaveStage.PROPOSED)["n0"]
    answer(fleet, "n1", SaveStage.PROPOSED, ok=False, reason="passed")
    second = orders(fleet, SaveStage.PROPOSED)["n0"]
    fleet.train(first, save=True)
    assert not fleet.orders(Prepare), "the script is not informed yet"
    assert fleet.job.planned is not None
    assert fleet.job.planned.at_step == second > first
    for node in ("n0", "n1"):
        answer(fleet, node, SaveStage.PROPOSED)
    leaving = [send.order.leaving for send in fleet.sent if isinstance(send.order, CheckpointNow)]
    assert all(each.startswith("scale_down: ") for each in leaving)
    fleet.train(second, save=True)
    assert fleet.orders(Prepare)


def test_a_request_during_a_proposal_is_served_by_the_same_step_and_its_upload() -> None:
    fleet = running(job(dp=2), spares=1, saved=20)
    fleet.fold(ResizeRequested(fleet.now, JOB, 1, "for a while"))
    first = orders(fleet, SaveStage.PROPOSED)["n0"]
    answer(fleet, "n0", SaveStage.PROPOSED)
    fleet.fold(CheckpointRequested(fleet.now, JOB, "op-1"))
    again = [send.order for send in fleet.sent if isinstance(send.order, CheckpointNow) and send.node == "n0"]
    assert [(order.at_step, order.to_object_store) for order in again] == [(first, True)]
    assert again[0].leaving.startswith("scale_down: ")
    answer(fleet, "n1", SaveStage.PROPOSED)  # of the proposal without an upload
    assert not orders(fleet, SaveStage.AGREED)
    for node in ("n0", "n1"):
        answer(fleet, node, SaveStage.PROPOSED)
    assert orders(fleet, SaveStage.AGREED) == {"n0": first, "n1": first}


def test_with_an_agent_of_an_earlier_version_the_save_is_ordered_directly() -> None:
    fleet = stopping(Older)
    assert orders(fleet, SaveStage.ORDER).keys() == NODES
    assert not orders(fleet, SaveStage.PROPOSED)
    fleet.answer_orders()
    assert not orders(fleet, SaveStage.AGREED)


@pytest.mark.parametrize("ok", [True, False])
def test_answers_after_the_decision_change_nothing(ok: bool) -> None:
    fleet = stopping()
    for node in sorted(NODES - {"n2"}):
        answer(fleet, node, SaveStage.PROPOSED)
    late = next(send for send in fleet.sent if send.node == "n2")
    answer(fleet, "n2", SaveStage.PROPOSED)
    before = fleet.job.checkpoints.on_demand
    fleet.report("n2", OrderDone(late.command_id, ok, "again", "", fleet.now))
    assert fleet.job.checkpoints.on_demand == before
    assert not orders(fleet, SaveStage.VOID)


# ---------------------------------------------------------------- the interval


def questioned(kind: type[Fleet] = Fleet) -> Fleet:
    """A running job, which saves every 10 steps, and of which the policy is asked what to do about a warning."""
    fleet = running(job(dp=3, interval=10), saved=20, kind=kind, decide=False)
    warn_of_a_slow_node(fleet)
    return fleet


def changing(steps: int = 3, kind: type[Fleet] = Fleet) -> Fleet:
    """The policy has decided another interval."""
    fleet = questioned(kind)
    fleet.answer(set_interval("it may fail soon", steps), "policy.py")
    return fleet


def intervals(fleet: Fleet) -> dict[str, tuple[int, int]]:
    """(from step, interval) of the unanswered orders of an interval, by node."""
    found = [(send.node, send.order) for send in fleet.sent if isinstance(send.order, SetInterval)]
    return {node: (order.from_step, order.interval_steps) for node, order in found}


def test_an_interval_changes_at_a_save_that_all_ranks_have_agreed_on_and_before_they_pass_it() -> None:
    fleet = changing()
    at_step = orders(fleet, SaveStage.PROPOSED)["n0"]
    assert at_step % 10 == 0 or at_step % 3 == 0, "no save in addition to those of the two intervals"
    for node in sorted(NODES):
        assert not intervals(fleet), "a rank may have passed the step"
        answer(fleet, node, SaveStage.PROPOSED)
    assert intervals(fleet) == dict.fromkeys(NODES, (at_step + 1, 3))
    for node in sorted(NODES):
        assert not orders(fleet, SaveStage.AGREED), "a rank could pass the step with the former interval"
        fleet.done(node, SetInterval)
    assert orders(fleet, SaveStage.AGREED) == dict.fromkeys(NODES, at_step)


def test_if_a_rank_has_passed_the_step_the_interval_changes_at_a_later_one() -> None:
    fleet = changing()
    first = orders(fleet, SaveStage.PROPOSED)["n0"]
    answer(fleet, "n0", SaveStage.PROPOSED)
    answer(fleet, "n2", SaveStage.PROPOSED, ok=False, reason="passed")
    assert not intervals(fleet)
    second = orders(fleet, SaveStage.PROPOSED)["n0"]
    for node in sorted(NODES):
        answer(fleet, node, SaveStage.PROPOSED)
    assert intervals(fleet) == dict.fromkeys(NODES, (second + 1, 3))
    assert second > first


def test_a_stop_during_the_proposal_does_not_wait_for_a_save_far_ahead_and_takes_the_interval_along() -> None:
    fleet = changing(steps=1000)
    fleet.fold(JobStopRequested(fleet.now, JOB, "seen enough", save=True))
    at_step = orders(fleet, SaveStage.PROPOSED)["n0"]
    assert isinstance(fleet.job.doing, Saving)
    assert fleet.job.doing.at_step == at_step
    for node in sorted(NODES):
        answer(fleet, node, SaveStage.PROPOSED)
    assert intervals(fleet) == dict.fromkeys(NODES, (at_step + 1, 1000))
    for node in sorted(NODES):
        fleet.done(node, SetInterval)
    agreed = [send.order for send in fleet.sent if isinstance(send.order, CheckpointNow)]
    assert all(order.leaving == "stop: seen enough" for order in agreed if order.stage == SaveStage.AGREED)
    assert orders(fleet, SaveStage.AGREED) == dict.fromkeys(NODES, at_step)


def test_an_interval_during_the_proposal_of_a_stop_changes_at_its_step() -> None:
    fleet = questioned()
    fleet.fold(CheckpointRequested(fleet.now, JOB, "op-1"))
    at_step = orders(fleet, SaveStage.PROPOSED)["n0"]
    answer(fleet, "n0", SaveStage.PROPOSED)
    fleet.answer(set_interval("it may fail soon", 3), "policy.py")
    for node in ("n1", "n2"):
        answer(fleet, node, SaveStage.PROPOSED)
    assert intervals(fleet) == dict.fromkeys(NODES, (at_step + 1, 3)), "one proposal serves both"


def test_a_request_while_nodes_get_the_interval_lets_no_rank_wait() -> None:
    fleet = changing()
    at_step = orders(fleet, SaveStage.PROPOSED)["n0"]
    for node in sorted(NODES):
        answer(fleet, node, SaveStage.PROPOSED)
    fleet.fold(CheckpointRequested(fleet.now, JOB, "op-1"))
    assert orders(fleet, SaveStage.AGREED) == dict.fromkeys(NODES, at_step)
    assert not orders(fleet, SaveStage.VOID)


def test_with_an_agent_of_an_earlier_version_the_interval_is_ordered_directly() -> None:
    fleet = changing(kind=Older)
    (from_step,) = {each for each, _ in intervals(fleet).values()}
    assert intervals(fleet) == dict.fromkeys(NODES, (from_step, 3))
    assert from_step > fleet.job.progress.newest_step
    assert not orders(fleet, SaveStage.ORDER)


# ---------------------------------------------------------------- changes that are dropped, and limits


def test_the_script_is_not_notified_of_a_change_that_is_dropped_during_the_proposal() -> None:
    fleet = running(job(dp=2), spares=1, saved=20)
    fleet.fold(ResizeRequested(fleet.now, JOB, 1, "for a while"))
    at_step = orders(fleet, SaveStage.PROPOSED)["n0"]
    answer(fleet, "n0", SaveStage.PROPOSED)
    fleet.fold(ResizeRequested(fleet.now, JOB, 2, "as before"))
    assert fleet.job.planned is None
    assert orders(fleet, SaveStage.VOID) == {"n0": at_step, "n1": at_step}
    fleet.answer_orders()
    fleet.train(at_step, save=True)
    assert not orders(fleet, SaveStage.AGREED)
    assert not orders(fleet, SaveStage.PROPOSED)


def test_a_save_that_was_also_requested_is_made_without_the_change() -> None:
    fleet = running(job(dp=2), spares=1, saved=20)
    fleet.fold(ResizeRequested(fleet.now, JOB, 1, "for a while"))
    fleet.fold(CheckpointRequested(fleet.now, JOB, "op-1"))
    at_step = orders(fleet, SaveStage.PROPOSED)["n0"]
    fleet.fold(ResizeRequested(fleet.now, JOB, 2, "as before"))
    waiting = [each.order for each in fleet.state.outbox.values() if isinstance(each.order, CheckpointNow)]
    proposed = [order for order in waiting if order.stage == SaveStage.PROPOSED]
    assert len(proposed) == 2, "a node that has not received the former proposals never does"
    assert {(order.at_step, order.to_object_store, order.leaving) for order in proposed} == {(at_step, True, "")}


@pytest.mark.parametrize(("step_s", "waits_s"), [(0.1, 10.0), (30.0, 70.0), (1000.0, 300.0)])
def test_a_stop_waits_for_its_save_as_long_as_the_steps_take_within_limits(step_s: float, waits_s: float) -> None:
    fleet = running(job(dp=3), saved=20)
    fleet.now += 1.0
    fleet.fold(StepsCompleted(fleet.now, JOB, fleet.job.number, 30, fleet.now, 1, step_s, pace_s=step_s))
    before = fleet.now
    fleet.fold(JobStopRequested(fleet.now, JOB, "seen enough", save=True))
    waited_s = fleet.state.timers[StopTimeout(JOB)] - before
    assert waits_s - 0.01 <= waited_s <= max(1.5 * waits_s, 20.0)
    fleet.now += waited_s / 2
    answer(fleet, "n0", SaveStage.PROPOSED, ok=False, reason="passed")
    assert fleet.state.timers[StopTimeout(JOB)] - fleet.now >= waits_s - 0.01, "the later step has as much time"


def test_an_operator_who_does_not_want_to_wait_for_the_save_stops_at_once() -> None:
    fleet = stopping()
    fleet.fold(JobStopRequested(fleet.now, JOB, "no time", save=False))
    assert isinstance(fleet.job.doing, Stopping)
