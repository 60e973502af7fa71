"""Decisions that waited until the saved steps were known: they are carried out on the job as it is then."""

from __future__ import annotations

import pytest
from fleet import Fleet, job

from holdfast.domain.findings import FindingKind, Remedy
from holdfast.domain.incidents import Action, ActionKind, RungEnd
from holdfast.domain.orders import OrderDone, Prepare, ResetGpu, Stop
from holdfast.policy import hot_swap, scale_down, stop
from holdfast.supervisor.core.model.lifecycle import Deferred
from holdfast.supervisor.protocol import JobPhase, LeaderStarted


def running(spares: int, *, dp: int = 3, decide: bool = False) -> Fleet:
    fleet = Fleet(dp + spares, decide=decide, resets_gpus=True)
    fleet.submit(job(dp=dp))
    fleet.run()
    fleet.train(20, save=True)
    fleet.now += 0.1
    return fleet


def deferred(fleet: Fleet, refusing: str) -> None:
    """A new leader does not know yet which shards the nodes hold, and a node of the change in flight cannot prepare."""
    fleet.fold(LeaderStarted(fleet.now, fleet.state.epoch + 1))
    for node in fleet.state.nodes:
        fleet.session += 1
        fleet.hello(node)
    fleet.done(refusing, Prepare, ok=False, reason="no memory")
    assert isinstance(fleet.job.doing, Deferred), fleet.job.reason


def test_a_swap_that_was_deferred_goes_on_with_the_next_spare() -> None:
    """The default policy's recipe after a refused reset: without that rung, the job would wait while a spare is free."""
    fleet = running(2)
    fleet.find(FindingKind.GPU_ERROR, "n1", gpu=0, recommended_actions=(Remedy.RESET_GPU,), generation=0)
    fleet.answer()
    for node in fleet.nodes():
        fleet.done(node, Stop)
    send = next(send for send in fleet.sent if isinstance(send.order, ResetGpu))
    fleet.report("n1", OrderDone(send.command_id, False, "the driver refused", at=fleet.now))
    assert fleet.nodes() == ("n0", "n3", "n2")
    deferred(fleet, "n3")
    fleet.wait(fleet.state.config.inventory_s + 0.1)
    fleet.expect(JobPhase.PREPARING)
    assert "n1" not in fleet.nodes()
    assert len(fleet.nodes()) == 3
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert [(rung.action, rung.end) for rung in fleet.incident.walk] == [
        (ActionKind.GPU_RESET, RungEnd.FAILED),
        (ActionKind.HOT_SWAP, RungEnd.DONE),
    ]


@pytest.mark.parametrize(
    ("recipe", "dp"),
    [
        (hot_swap("a spare", "n1"), 3),
        (scale_down("fewer replicas", "n1"), 2),
        (scale_down("fewer replicas", dp=2), 2),
    ],
)
def test_a_rung_whose_generation_was_planned_is_not_refused_for_what_it_has_done(recipe: Action, dp: int) -> None:
    fleet = running(3)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.answer(recipe.otherwise(stop("nothing is left")), "policy.py")
    deferred(fleet, next(node for node in fleet.nodes() if node != "n0"))
    fleet.wait(fleet.state.config.inventory_s + 0.1)
    fleet.expect(JobPhase.PREPARING)
    assert len(fleet.nodes()) == dp
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    crash = next(each for each in fleet.state.closed if each.kind == FindingKind.WORKER_CRASH)
    assert [(rung.action, rung.end) for rung in crash.walk] == [(recipe.kind, RungEnd.DONE)]
