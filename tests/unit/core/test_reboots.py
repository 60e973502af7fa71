"""Machines that only a boot brings back are booted: once nothing needs them, never under ranks, and what fails is said."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet import JOB, Fleet, job

from holdfast.domain import orders
from holdfast.domain.findings import FindingKind, Remedy, Severity
from holdfast.domain.nodes import NodeState
from holdfast.domain.orders import Prepare, RebootNode, Stop
from holdfast.supervisor.core.fleet import returns
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.repair import reboots
from holdfast.supervisor.core.repair.reboots import BOOT_S, LOOK_S
from holdfast.supervisor.core.rules.holddown import REBOOTS_MAX
from holdfast.supervisor.protocol import JobPhase, NodeCordonRequested, NodeRepaired
from holdfast.supervisor.return_rules import ReturnRules

RULES = ReturnRules()


def training(dp: int = 2, spares: int = 1, *, able: bool = True) -> Fleet:
    fleet = Fleet(0, reboots=able)
    for index in range(dp + spares):
        fleet.boot(f"n{index}")
        fleet.report(f"n{index}", orders.Inventory(JOB, ()))
    fleet.submit(job(dp=dp))
    fleet.run()
    return fleet


def xid(fleet: Fleet, node: str) -> None:
    """79: the catalogue says that the machine must be booted."""
    recommended_actions = (Remedy.REBOOT_NODE, Remedy.REPLACE_NODE)
    fleet.find(FindingKind.GPU_ERROR, node, severity=Severity.FATAL, recommended_actions=recommended_actions)


def gone(fleet: Fleet, node: str) -> None:
    """Its workers are."""
    fleet.workers(node)


def ordered(fleet: Fleet) -> list[str]:
    return sorted(fleet.orders(RebootNode))


def standing(fleet: Fleet, node: str) -> str:
    return returns.standing(fleet.state.nodes[node], fleet.now, RULES.probation_s)


def swapped(*, save: bool = True) -> Fleet:
    """n0 has had a fatal finding, and its job goes on with the spare; `save`: it has saved there since."""
    fleet = training()
    fleet.train(10, save=True)
    xid(fleet, "n0")
    fleet.run()
    gone(fleet, "n0")
    if save:
        fleet.train(20, save=True)
    return fleet


def test_a_node_out_of_service_is_booted_when_its_job_has_saved_elsewhere_and_comes_back() -> None:
    fleet = swapped()
    assert "n0" not in fleet.nodes()
    fleet.wait(LOOK_S + 1)
    assert ordered(fleet) == ["n0"]
    order = fleet.orders(RebootNode)["n0"]
    assert isinstance(order, RebootNode)
    assert order.cause == fleet.state.nodes["n0"].unschedulable_reason
    fleet.done("n0", RebootNode)
    assert "was ordered to boot 2 s ago" in standing(fleet, "n0")
    fleet.boot("n0")
    assert "on hold until" in standing(fleet, "n0")
    fleet.wait(RULES.hold_s + 1)
    assert fleet.state.nodes["n0"].state is NodeState.SPARE
    assert ordered(fleet) == []


def test_an_idle_node_is_booted_at_once() -> None:
    fleet = training()
    xid(fleet, "n2")
    assert ordered(fleet) == ["n2"]


def test_no_machine_boots_under_workers() -> None:
    fleet = swapped()
    fleet.workers("n0", 0, generation=1)  # one of the generation before did not end
    fleet.wait(LOOK_S + 1)
    assert ordered(fleet) == []
    assert "not while workers still run on it" in standing(fleet, "n0")
    gone(fleet, "n0")
    fleet.done("n0", Stop)
    fleet.wait(LOOK_S + 1)
    assert ordered(fleet) == ["n0"]


def test_no_machine_boots_while_a_change_may_fetch_shards_from_it() -> None:
    fleet = training()
    fleet.train(10, save=True)
    xid(fleet, "n0")
    fleet.done("n0", Stop)
    assert fleet.orders(Prepare)
    assert ordered(fleet) == []
    obstacle = reboots.obstacle(Turn(fleet.state, fleet.now), fleet.state.nodes["n0"])
    assert obstacle == "job is in a change, and may fetch shards from it"


def test_no_machine_boots_that_has_the_only_copy_of_the_newest_checkpoint() -> None:
    fleet = swapped(save=False)
    alone = fleet.state.nodes["n0"].inventory[JOB]
    for node in ("n1", "n2"):
        fleet.report(node, orders.Inventory(JOB, ()))
    fleet.wait(LOOK_S + 1)
    assert ordered(fleet) == []
    assert "its memory has the only copy of a checkpoint of job" in standing(fleet, "n0")
    fleet.report("n0", orders.Inventory(JOB, (*alone, *(replace(each, tier="disk") for each in alone))))
    fleet.wait(LOOK_S + 1)
    assert ordered(fleet) == ["n0"]


def test_a_copy_that_no_replicator_serves_is_none() -> None:
    fleet = swapped(save=False)
    nodes = dict(fleet.state.nodes)
    assert reboots.obstacle(Turn(fleet.state, fleet.now), nodes["n0"]) == ""
    for name in ("n1", "n2"):
        nodes[name] = replace(nodes[name], facts=replace(nodes[name].facts, replicator_endpoint=""))
    state = replace(fleet.state, nodes=nodes)
    obstacle = reboots.obstacle(Turn(state, fleet.now), nodes["n0"])
    assert obstacle == "its memory has the only copy of a checkpoint of job"


def test_a_failed_try_is_repeated_a_few_times_and_then_left_to_an_operator() -> None:
    fleet = training()
    xid(fleet, "n2")
    for turn in range(REBOOTS_MAX):
        assert ordered(fleet) == ["n2"], turn
        fleet.done("n2", RebootNode, ok=False, reason="`reboot` ended with exit code 1: not allowed")
        assert "could not be booted (`reboot` ended with exit code 1: not allowed)" in standing(fleet, "n2")
        assert ordered(fleet) == []
        fleet.wait(LOOK_S + 1)
    fleet.wait(BOOT_S)
    assert ordered(fleet) == []
    assert "it comes back after a boot by hand" in standing(fleet, "n2")
    fleet.boot("n2")  # somebody does
    assert "on hold until" in standing(fleet, "n2")


def test_a_command_that_ends_well_without_a_boot_is_a_failure_after_half_an_hour() -> None:
    fleet = training()
    xid(fleet, "n2")
    fleet.done("n2", RebootNode)
    fleet.wait(BOOT_S + 1)
    assert "30 min after the order it had not booted" in standing(fleet, "n2")
    fleet.wait(LOOK_S + 1)
    assert ordered(fleet) == ["n2"]


def test_an_agent_that_restarts_is_not_a_machine_that_booted() -> None:
    fleet = training()
    xid(fleet, "n2")
    fleet.connect("n2")
    assert ordered(fleet) == ["n2"]  # the same order, sent again: the agent answers it from its ledger
    assert fleet.state.nodes["n2"].removal is not None


def test_nothing_is_booted_twice_for_two_findings() -> None:
    fleet = training()
    xid(fleet, "n2")
    fleet.done("n2", RebootNode)
    xid(fleet, "n2")
    fleet.wait(LOOK_S + 1)
    assert ordered(fleet) == []


@pytest.mark.parametrize(
    "spoken", [lambda at: NodeRepaired(at, "n2"), lambda at: NodeCordonRequested(at, "n2", cordoned=True, reason="")]
)
def test_an_operator_ends_it(spoken) -> None:  # type: ignore[no-untyped-def]
    fleet = training()
    xid(fleet, "n2")
    assert ordered(fleet) == ["n2"]
    fleet.fold(spoken(fleet.now))
    assert ordered(fleet) == []
    fleet.wait(BOOT_S)
    assert ordered(fleet) == []


def test_an_agent_without_a_command_is_never_asked() -> None:
    fleet = training(able=False)
    xid(fleet, "n2")
    fleet.wait(BOOT_S)
    assert ordered(fleet) == []
    assert "when its machine has been booted again" in standing(fleet, "n2")


def test_while_the_breaker_is_open_nothing_is_booted() -> None:
    fleet = training(dp=2, spares=6)
    for index in range(2, 8):
        xid(fleet, f"n{index}")
    assert fleet.state.breaker.open_until is not None
    out = set(ordered(fleet))
    assert out < {f"n{index}" for index in range(2, 8)}
    fleet.expect(JobPhase.RUNNING)
    fleet.wait(fleet.state.breaker.open_until - fleet.now + LOOK_S + 1)
    assert set(ordered(fleet)) == {f"n{index}" for index in range(2, 8)}
