"""Machines that do not come back are replaced: once, when nothing is lost with them, and never more than were allowed."""

from __future__ import annotations

import dataclasses

import pytest
from fleet import JOB, Fleet, job

from holdfast.domain import orders
from holdfast.domain.findings import FindingKind, Remedy, Severity
from holdfast.domain.nodes import NodeState
from holdfast.domain.orders import Prepare, RebootNode, Stop
from holdfast.supervisor.core.fleet import returns
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.repair import replacements
from holdfast.supervisor.core.repair.reboots import LOOK_S
from holdfast.supervisor.core.repair.replacements import RETRY_S
from holdfast.supervisor.core.rules.holddown import REQUESTS_MAX
from holdfast.supervisor.protocol import (
    Command,
    JobPhase,
    LeaderStarted,
    NodeCordonRequested,
    NodeRepaired,
    ProviderAnswered,
    RequestReplacement,
)
from holdfast.supervisor.return_rules import DAY_S, ReplacementRules, ReturnRules

RULES = ReturnRules()
AFTER_S = 1800.0


def other_machine(fleet: Fleet, node: str) -> None:
    fleet.machines[node] = f"{node} machine {fleet.life[node] + 1}"
    fleet.boot(node)


def training(dp: int = 2, spares: int = 2, *, per_day: int = 10, provider: str = "command") -> Fleet:
    fleet = Fleet(0)
    rules = ReplacementRules(provider=provider, after_s=AFTER_S, per_day_max=per_day)
    fleet.fold(LeaderStarted(fleet.now, 1, "secret", None, rules))
    for index in range(dp + spares):
        fleet.life[f"n{index}"] = 0
        other_machine(fleet, f"n{index}")
        fleet.report(f"n{index}", orders.Inventory(JOB, ()))
    fleet.submit(job(dp=dp))
    fleet.run()
    return fleet


def lead(fleet: Fleet, started: LeaderStarted) -> tuple[Command, ...]:
    """Another leader begins, and all agents come to it."""
    commands = fleet.fold(started)
    for node in sorted(fleet.life):
        fleet.hello(node)
    fleet.all_live()
    return commands


def corrupt(fleet: Fleet, node: str) -> None:
    """Only an operator brings it back."""
    fleet.find(FindingKind.SILENT_CORRUPTION, node, severity=Severity.FATAL, recommended_actions=(Remedy.REPLACE_NODE,))


def xid(fleet: Fleet, node: str) -> None:
    fleet.find(
        FindingKind.GPU_ERROR,
        node,
        severity=Severity.FATAL,
        recommended_actions=(Remedy.REBOOT_NODE, Remedy.REPLACE_NODE),
    )


def requested(fleet: Fleet) -> list[str]:
    return [each.node for each in fleet.requested]


def answer(fleet: Fleet, *, ok: bool = True, reason: str = "instance recreated") -> RequestReplacement:
    wanted = fleet.requested.pop(0)
    fleet.fold(ProviderAnswered(fleet.now, wanted.node, wanted.request, ok, reason))
    return wanted


def standing(fleet: Fleet, node: str) -> str:
    return returns.standing(fleet.state.nodes[node], fleet.now, RULES.probation_s)


def test_a_machine_that_only_an_operator_brings_back_is_replaced_at_once_and_the_new_one_is_a_spare() -> None:
    fleet = training()
    corrupt(fleet, "n3")
    (wanted,) = fleet.requested
    assert (wanted.node, wanted.hostname, wanted.reason) == ("n3", "n3", fleet.state.nodes["n3"].unschedulable_reason)
    assert "another machine was requested 0 s ago" in standing(fleet, "n3")
    answer(fleet)
    assert "will come (instance recreated)" in standing(fleet, "n3")
    other_machine(fleet, "n3")
    node = fleet.state.nodes["n3"]
    assert (node.state, node.removal, node.faults, node.unschedulable_reason) == (NodeState.SPARE, None, (), "")
    assert standing(fleet, "n3") == ""
    fleet.wait(2 * AFTER_S)
    assert requested(fleet) == []


def test_the_same_machine_is_not_taken_for_another_one() -> None:
    fleet = training()
    corrupt(fleet, "n3")
    answer(fleet)
    fleet.boot("n3")  # somebody has only booted it
    assert fleet.state.nodes["n3"].state is NodeState.CORDONED
    fleet.wait(2 * AFTER_S)
    assert requested(fleet) == [], "who agreed is not asked again"


def test_a_machine_that_may_come_back_by_itself_has_time_to() -> None:
    fleet = training()
    xid(fleet, "n3")
    fleet.wait(AFTER_S - 10)
    assert requested(fleet) == []
    fleet.wait(20)
    assert requested(fleet) == ["n3"]


def test_a_fault_that_calls_for_another_machine_is_answered_by_one_and_by_a_boot_if_there_is_none() -> None:
    fleet = training()
    fleet.reboots = True
    fleet.boot("n3")  # an agent that can boot its machine
    fleet.report("n3", orders.Inventory(JOB, ()))
    fleet.now += 1.0
    fleet.find(FindingKind.GPU_ERROR, "n3", severity=Severity.FATAL, recommended_actions=(Remedy.REPLACE_NODE,))
    for _ in range(REQUESTS_MAX):
        assert not fleet.orders(RebootNode)
        assert requested(fleet) == ["n3"]
        answer(fleet, ok=False, reason="no capacity")
        fleet.wait(RETRY_S + 1)
    fleet.wait(LOOK_S + 1)
    assert set(fleet.orders(RebootNode)) == {"n3"}


def test_without_a_provider_it_is_booted_at_once() -> None:
    fleet = training(provider="")
    fleet.reboots = True
    fleet.boot("n3")
    fleet.report("n3", orders.Inventory(JOB, ()))
    fleet.now += 1.0
    fleet.find(FindingKind.GPU_ERROR, "n3", severity=Severity.FATAL, recommended_actions=(Remedy.REPLACE_NODE,))
    assert set(fleet.orders(RebootNode)) == {"n3"}


def test_a_machine_that_booted_meanwhile_is_not_replaced() -> None:
    fleet = training()
    xid(fleet, "n3")
    fleet.wait(AFTER_S / 2)
    fleet.boot("n3")
    fleet.wait(2 * AFTER_S)
    assert requested(fleet) == []
    assert fleet.state.nodes["n3"].state is NodeState.SPARE


def test_a_lost_machine_is_replaced_when_its_job_has_saved_elsewhere() -> None:
    fleet = training()
    fleet.train(10, save=True)
    fleet.lose("n0")
    fleet.run()
    fleet.train(20, save=True)
    assert "n0" not in fleet.nodes()
    fleet.wait(AFTER_S + LOOK_S)
    assert requested(fleet) == ["n0"]
    fleet.expect(JobPhase.RUNNING)


def test_no_machine_is_replaced_that_has_the_only_copy_of_a_checkpoint_on_its_disk() -> None:
    fleet = training()
    fleet.train(10, save=True)
    alone = fleet.state.nodes["n0"].inventory[JOB]
    fleet.lose("n0")
    fleet.run()
    for node in fleet.nodes():
        fleet.report(node, orders.Inventory(JOB, ()))
    disk = tuple(dataclasses.replace(each, tier="disk") for each in alone)
    fleet.connect("n0")
    fleet.report("n0", orders.Inventory(JOB, disk))
    corrupt(fleet, "n0")
    fleet.wait(2 * AFTER_S)
    assert requested(fleet) == []
    assert "not requested yet: it has the only copy of a checkpoint of job" in standing(fleet, "n0")
    for node in fleet.nodes():
        fleet.report(node, orders.Inventory(JOB, disk))
    fleet.wait(LOOK_S + 1)
    assert requested(fleet) == ["n0"]


def test_after_a_power_failure_machines_that_are_away_together_keep_what_only_they_have() -> None:
    fleet = training(spares=0)
    fleet.train(10, save=True)
    fleet.lose("n0")
    fleet.lose("n1")
    fleet.wait(2 * AFTER_S)
    assert len(requested(fleet)) <= 1, "of two copies one may go"
    kept = {name for name in ("n0", "n1") if name not in requested(fleet)}
    assert all(fleet.state.nodes[name].inventory[JOB] for name in kept)


def test_a_spare_that_never_held_a_shard_is_replaced_and_booted_all_the_same() -> None:
    fleet = training()
    fleet.reboots = True
    for node in ("n4", "n5"):
        fleet.life[node] = 0
        other_machine(fleet, node)
        fleet.now += 1.0
    corrupt(fleet, "n4")
    fleet.find(FindingKind.GPU_ERROR, "n5", severity=Severity.FATAL, recommended_actions=(Remedy.REBOOT_NODE,))
    assert requested(fleet) == []
    assert "it has not reported which shards it holds" in standing(fleet, "n4")
    fleet.wait(LOOK_S + 1)
    assert requested(fleet) == ["n4"]
    assert set(fleet.orders(RebootNode)) == {"n5"}


def test_no_machine_is_replaced_under_workers_or_during_a_change() -> None:
    fleet = training()
    fleet.train(10, save=True)
    corrupt(fleet, "n0")
    assert fleet.orders(Prepare)
    assert requested(fleet) == []
    said = replacements.obstacle(Turn(fleet.state, fleet.now), fleet.state.nodes["n0"])
    assert said == "workers still run on it"
    fleet.run()
    fleet.workers("n0", 0, generation=1)  # one did not end
    fleet.train(20, save=True)
    fleet.wait(2 * LOOK_S)
    assert requested(fleet) == []
    fleet.workers("n0")
    fleet.done("n0", Stop)
    fleet.wait(LOOK_S + 1)
    assert requested(fleet) == ["n0"]


def test_a_refusal_is_repeated_a_few_times_as_another_request() -> None:
    fleet = training()
    corrupt(fleet, "n3")
    seen = set()
    for _ in range(REQUESTS_MAX):
        assert requested(fleet) == ["n3"]
        seen.add(answer(fleet, ok=False, reason="no capacity in this zone").request)
        assert "requested, but no capacity in this zone" in standing(fleet, "n3")
        fleet.wait(RETRY_S + 1)
    assert len(seen) == REQUESTS_MAX
    fleet.wait(2 * AFTER_S)
    assert requested(fleet) == []
    assert "repeated" not in standing(fleet, "n3")


def test_no_answer_is_an_operators_to_look_at_and_never_asked_again() -> None:
    fleet = training()
    corrupt(fleet, "n3")
    lost = fleet.requested.pop()
    commands = lead(fleet, LeaderStarted(fleet.now, 2, "another"))
    assert not [each for each in commands if isinstance(each, RequestReplacement)]
    fleet.wait(2 * AFTER_S)
    assert requested(fleet) == []
    assert "has not answered: look whether the machine is replaced" in standing(fleet, "n3")
    fleet.fold(ProviderAnswered(fleet.now, "n3", lost.request, True, "recreated"))  # late is better than never
    assert "will come (recreated)" in standing(fleet, "n3")


def test_no_more_machines_a_day_than_allowed() -> None:
    fleet = training(spares=6, per_day=2)
    for name in ("n2", "n3", "n4"):
        corrupt(fleet, name)
        fleet.wait(400)  # apart, so that the breaker has no reason
    assert requested(fleet) == ["n2", "n3"]
    assert "2 machines have been replaced within a day: until" in standing(fleet, "n4")
    fleet.wait(DAY_S)
    assert requested(fleet) == ["n2", "n3", "n4"]


def test_without_a_provider_nobody_is_asked() -> None:
    fleet = training(provider="")
    corrupt(fleet, "n3")
    fleet.wait(2 * AFTER_S)
    assert requested(fleet) == []
    assert "another machine" not in standing(fleet, "n3")


def test_a_provider_that_is_named_later_is_asked_about_what_is_out_already() -> None:
    fleet = training(provider="")
    corrupt(fleet, "n3")
    lead(fleet, LeaderStarted(fleet.now, 2, "x", None, ReplacementRules(provider="command")))
    fleet.wait(LOOK_S + 1)
    assert requested(fleet) == ["n3"]


@pytest.mark.parametrize(
    "spoken", [lambda at: NodeRepaired(at, "n3"), lambda at: NodeCordonRequested(at, "n3", cordoned=True, reason="")]
)
def test_an_operator_ends_it(spoken) -> None:  # type: ignore[no-untyped-def]
    fleet = training()
    corrupt(fleet, "n3")
    answer(fleet, ok=False, reason="not now")
    fleet.fold(spoken(fleet.now))
    fleet.wait(2 * AFTER_S)
    assert requested(fleet) == []


def test_while_the_breaker_is_open_nobody_is_asked() -> None:
    fleet = training(spares=6)
    for index in range(2, 8):
        corrupt(fleet, f"n{index}")
    assert fleet.state.breaker.open_until is not None
    before = requested(fleet)
    assert len(before) < 6
    fleet.wait(fleet.state.breaker.open_until - fleet.now + LOOK_S + 1)
    assert len(requested(fleet)) == 6


def test_another_machine_under_the_name_has_no_record_of_the_one_before_but_keeps_an_operators_cordon() -> None:
    fleet = training()
    fleet.fold(NodeCordonRequested(fleet.now, "n3", cordoned=True, reason="new switch"))
    other_machine(fleet, "n3")
    assert "new switch" in fleet.state.nodes["n3"].unschedulable_reason
    xid(fleet, "n2")
    assert fleet.state.nodes["n2"].removal is not None
    other_machine(fleet, "n2")
    node = fleet.state.nodes["n2"]
    assert (node.removal, node.probation, node.faults, node.state) == (None, None, (), NodeState.SPARE)
