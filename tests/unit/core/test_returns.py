"""Nodes that a fault took out come back: what brings them back, how long they are held down, and who never comes back alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fleet import Fleet, job, running
from returning import (
    FULL,
    HOLD,
    PROBATION,
    RULES,
    UNDER_WAY,
    boot,
    fault,
    lose,
    node_of,
    off,
    result,
    spares,
    standing,
    training,
    xid,
)

from holdfast.domain import orders
from holdfast.domain.evolve import evolve
from holdfast.domain.findings import FindingKind, Remedy, Severity
from holdfast.domain.nodes import NodeState, Preflight
from holdfast.domain.orders import Hello, OrderDone, Prepare, ResetGpu, Stop
from holdfast.supervisor.core.fleet import returns
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules import holddown
from holdfast.supervisor.core.rules.holddown import Cure, Probation, Removal, hold_s
from holdfast.supervisor.core.rules.offenders import Fault
from holdfast.supervisor.core.rules.planner import Request, Spare, plan
from holdfast.supervisor.protocol import (
    JobPhase,
    LeaderStarted,
    NodeCordonRequested,
    NodeRepaired,
)
from holdfast.supervisor.return_rules import DAY_S, ReturnRules
from holdfast.supervisor.timers import ReturnDue


@pytest.mark.parametrize(
    ("cure", "hardware", "faults", "seconds"),
    [
        (Cure.REBOOT, True, [fault(0)], HOLD),
        (Cure.REBOOT, True, [fault(0), fault(1)], 2 * HOLD),
        (Cure.REBOOT, True, [fault(0), fault(1), fault(2)], 4 * HOLD),
        (Cure.REBOOT, True, [fault(at) for at in range(40)], RULES.hold_s_max),
        (Cure.REBOOT, True, [], HOLD),  # one that does not count, such as an injected one
        (Cure.STOPPED, False, [], HOLD),
        (Cure.RETURN, True, [fault(0)], HOLD),  # a reset of idle GPUs
        (Cure.RETURN, False, [fault(0)], 0.0),  # the first loss is free
        (Cure.RETURN, False, [fault(0), fault(1)], HOLD),
        (Cure.RETURN, False, [fault(0), fault(1, shared=True)], 0.0),
        (Cure.RETURN, False, [fault(0), fault(1, agent_only=True)], 0.0),
        (Cure.RETURN, False, [fault(0), fault(1, weight=0.5)], 0.0),
        (Cure.RETURN, False, [fault(-8 * DAY_S), fault(0)], 0.0),
    ],
)
def test_a_hold_down_grows_with_the_record(cure: Cure, hardware: bool, faults: list[Fault], seconds: float) -> None:
    assert hold_s(Removal("", 10.0, cure, hardware), faults, 10.0, RULES) == seconds


def test_the_planner_takes_a_spare_on_probation_last() -> None:
    worse = Spare("a", faults_per_day=1.0)
    chosen = plan(Request(job(dp=1), 1, 1, spares=(Spare("n", on_probation=True), worse)))
    assert getattr(chosen, "nodes", ()) == ("a",)


# ---------------------------------------------------------------- with evidence against the hardware


def test_after_a_reboot_tests_and_the_hold_down_a_node_is_a_spare_on_probation_and_then_a_spare() -> None:
    fleet = training()
    xid(fleet, "n1")
    fleet.run()
    assert fleet.nodes() == ("n0", "n2")
    assert "comes back by itself when its machine has been booted again and has passed its tests" in standing(
        fleet, "n1"
    )
    fleet.wait(5 * HOLD)
    assert node_of(fleet, "n1").state is NodeState.CORDONED, "nothing has been done about it"
    off(fleet, "n1")
    boot(fleet, "n1")
    assert "on hold until" in standing(fleet, "n1")
    assert "then a spare on probation until" in standing(fleet, "n1")
    fleet.wait(HOLD - 1)
    assert spares(fleet) == ()
    fleet.wait(2)
    assert spares(fleet) == ("n1",)
    assert (node_of(fleet, "n1").state, standing(fleet, "n1")[:18]) == (NodeState.SPARE, "on probation until")
    fleet.wait(PROBATION)
    assert (node_of(fleet, "n1").probation, standing(fleet, "n1")) == (None, "")
    assert ReturnDue("n1") not in fleet.state.timers


def test_an_agent_that_starts_again_is_no_reboot() -> None:
    fleet = training()
    xid(fleet, "n1")
    fleet.run()
    fleet.life["n1"] += 1
    fleet.seq["n1"] = 0
    fleet.report("n1", Hello(fleet.facts("n1"), (), UNDER_WAY))
    result(fleet, "n1")
    fleet.wait(5 * HOLD)
    assert spares(fleet) == ()


def test_a_node_whose_agent_does_not_tell_its_boots_waits_for_an_operator_and_says_so() -> None:
    fleet = running(job(dp=2), spares=1)
    xid(fleet, "n1")
    fleet.run()
    assert "does not report the boot id" in standing(fleet, "n1")
    fleet.connect("n1")
    fleet.wait(5 * HOLD)
    assert spares(fleet) == ()
    fleet.fold(NodeRepaired(fleet.now, "n1"))
    assert spares(fleet) == ("n1",)


def test_a_node_that_fails_its_tests_stays_out_until_it_passes_them() -> None:
    fleet = training()
    xid(fleet, "n1")
    fleet.run()
    off(fleet, "n1")
    boot(fleet, "n1", tests=False)
    result(fleet, "n1", *FULL)
    fleet.wait(2 * HOLD)
    assert "until it passes its pre-flight test (failed: disk" in standing(fleet, "n1")
    assert spares(fleet) == ()
    result(fleet, "n1")
    assert spares(fleet) == ("n1",)


def test_a_node_without_tests_of_its_own_does_not_come_back_from_a_hardware_fault() -> None:
    fleet = training()
    fleet.state = replace(
        fleet.state, nodes={name: evolve(each, preflight=None) for name, each in fleet.state.nodes.items()}
    )
    xid(fleet, "n1")
    fleet.run()
    off(fleet, "n1")
    fleet.boots["n1"] = "another"
    fleet.connect("n1")
    fleet.wait(2 * HOLD)
    assert spares(fleet) == ()
    assert "`holdfast nodes repair n1`" in standing(fleet, "n1")


def test_a_job_that_waits_does_not_get_a_node_in_a_hold_down_after_a_hardware_fault() -> None:
    fleet = training(spares=0, min_dp=2)
    xid(fleet, "n1")
    fleet.answer_orders()
    fleet.expect(JobPhase.WAITING)
    off(fleet, "n1")
    boot(fleet, "n1")
    fleet.wait(HOLD - 60)
    fleet.expect(JobPhase.WAITING)
    fleet.wait(61)
    fleet.run()
    fleet.expect(JobPhase.RUNNING, "one on probation is used when there is no better one")
    assert node_of(fleet, "n1").probation is not None


def test_a_second_fault_on_probation_sends_the_node_away_until_an_operator_speaks() -> None:
    fleet = training()
    for _ in range(2):
        xid(fleet, "n1")
        fleet.run()
        off(fleet, "n1")
        boot(fleet, "n1")
        fleet.wait(HOLD + 120)
    assert standing(fleet, "n1").startswith(
        "out of service until `holdfast nodes repair n1`: second fault on probation"
    )
    fleet.wait(10 * DAY_S)
    assert spares(fleet) == ()
    fleet.fold(NodeRepaired(fleet.now, "n1"))
    assert spares(fleet) == ("n1",)
    assert (node_of(fleet, "n1").probation, standing(fleet, "n1")) == (None, "")


def test_a_fault_after_the_probation_is_the_next_and_doubles_the_hold_down() -> None:
    fleet = training()
    xid(fleet, "n1")
    fleet.run()
    boot(fleet, "n1")
    fleet.wait(HOLD + PROBATION + 1)
    xid(fleet, "n1")
    boot(fleet, "n1")
    fleet.wait(2 * HOLD - 1)
    assert spares(fleet) == ()
    fleet.wait(1)
    assert spares(fleet) == ("n1",)


def test_a_fault_in_the_hold_down_begins_it_anew_and_needs_another_boot() -> None:
    fleet = training()
    xid(fleet, "n1")
    fleet.run()
    boot(fleet, "n1")
    fleet.wait(HOLD / 2)
    xid(fleet, "n1")
    fleet.wait(5 * HOLD)
    assert spares(fleet) == ()
    boot(fleet, "n1")
    fleet.wait(2 * HOLD)
    assert spares(fleet) == ("n1",)


def test_a_loss_in_the_hold_down_needs_no_other_boot() -> None:
    fleet = training(spares=0, min_dp=2)
    xid(fleet, "n1")
    fleet.answer_orders()
    boot(fleet, "n1")
    fleet.wait(HOLD / 2)
    fleet.lose("n1")
    fleet.wait(60)
    fleet.hello("n1")
    result(fleet, "n1")
    assert "on hold until" in standing(fleet, "n1")
    assert "after gpu_error" in standing(fleet, "n1")
    fleet.wait(2 * HOLD)
    assert node_of(fleet, "n1").in_service


def test_several_findings_of_one_fault_count_once() -> None:
    fleet = training()
    for _ in range(5):
        xid(fleet, "n2")
        fleet.wait(1)
    assert len(node_of(fleet, "n2").faults) == 1
    boot(fleet, "n2")
    fleet.wait(HOLD + 1)
    assert spares(fleet) == ("n2",)
    xid(fleet, "n1")
    fleet.run()
    for _ in range(3):  # about the node that has left
        xid(fleet, "n1")
        reset_due(fleet, "n1")
    assert len(node_of(fleet, "n1").faults) == 1


def test_wrong_results_are_for_an_operator_to_judge() -> None:
    fleet = training()
    fleet.find(FindingKind.SILENT_CORRUPTION, "n1", severity=Severity.FATAL)
    fleet.run()
    off(fleet, "n1")
    boot(fleet, "n1")
    fleet.wait(5 * DAY_S)
    assert spares(fleet) == ()
    assert "comes back only by `holdfast nodes repair n1`" in standing(fleet, "n1")


def test_a_finding_repeated_after_the_return_is_ignored() -> None:
    fleet = training()
    fleet.find(FindingKind.GPU_ERROR, "n2", severity=Severity.FATAL, name="xid")
    boot(fleet, "n2")
    fleet.wait(HOLD + 1)
    assert spares(fleet) == ("n2",)
    fleet.find(FindingKind.GPU_ERROR, "n2", severity=Severity.FATAL, name="xid")
    assert spares(fleet) == ("n2",)
    assert "has come back from it since" in fleet.notes()


def test_a_finding_repeated_while_a_booted_node_is_held_down_does_not_boot_it_again() -> None:
    fleet = training()
    for name in ("xid", "nvml"):
        fleet.find(FindingKind.GPU_ERROR, "n2", severity=Severity.FATAL, name=name)
    boot(fleet, "n2")
    before = node_of(fleet, "n2").removal
    assert before is not None
    assert before.back_at is not None
    fleet.find(FindingKind.GPU_ERROR, "n2", severity=Severity.FATAL, name="xid")
    assert node_of(fleet, "n2").removal == before
    fleet.wait(HOLD + 1)
    assert spares(fleet) == ("n2",)


# ---------------------------------------------------------------- resets


def reset_due(fleet: Fleet, node: str) -> None:
    fleet.find(FindingKind.GPU_ERROR, node, gpu=0, recommended_actions=(Remedy.RESET_GPU, Remedy.REBOOT_NODE))


def test_a_boot_resets_the_gpus_of_a_node_that_cannot() -> None:
    fleet = training()
    reset_due(fleet, "n1")
    fleet.run()
    assert fleet.nodes() == ("n0", "n2")
    off(fleet, "n1")
    boot(fleet, "n1")
    assert node_of(fleet, "n1").reset_due is None
    assert "on hold until" in standing(fleet, "n1")
    fleet.wait(HOLD + 1)
    assert spares(fleet) == ("n1",)


def test_a_boot_is_the_next_step_after_a_reset_that_failed() -> None:
    fleet = training()
    fleet.resets_gpus = True
    boot(fleet, "n2")
    reset_due(fleet, "n2")
    fleet.done("n2", ResetGpu, ok=False, reason="the command ended with exit code 1")
    assert "when its machine has been booted again" in standing(fleet, "n2")
    boot(fleet, "n2")
    fleet.wait(HOLD + 1)
    assert spares(fleet) == ("n2",)
    assert node_of(fleet, "n2").reset_due is None


def test_the_answer_of_a_reset_that_a_boot_overtook_says_nothing() -> None:
    fleet = training()
    fleet.resets_gpus = True
    boot(fleet, "n2")
    reset_due(fleet, "n2")
    send = next(each for each in fleet.sent if isinstance(each.order, ResetGpu))
    boot(fleet, "n2")
    fleet.report("n2", OrderDone(send.command_id, False, "the agent ended during the reset", "", fleet.now))
    fleet.wait(HOLD + 1)
    assert spares(fleet) == ("n2",)


# ---------------------------------------------------------------- workers that did not stop


def test_a_node_that_did_not_stop_its_workers_comes_back_when_they_are_gone() -> None:
    fleet = training(dp=2, spares=1)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)  # the second one: a spare takes over
    assert "n1" in fleet.orders(Stop)
    fleet.done("n1", Stop, ok=False, reason="its processes do not end")
    fleet.run()
    assert "when these workers are gone" in standing(fleet, "n1")
    fleet.wait(DAY_S)
    assert "when these workers are gone" in standing(fleet, "n1")
    boot(fleet, "n1")
    fleet.wait(HOLD + 1)
    assert node_of(fleet, "n1").state is NodeState.SPARE


# ---------------------------------------------------------------- operators, leaders, snapshots


def test_a_node_that_an_operator_cordoned_never_comes_back_by_itself() -> None:
    fleet = training()
    fleet.fold(NodeCordonRequested(fleet.now, "n2", True, "to the workshop"))
    boot(fleet, "n2")
    fleet.wait(10 * DAY_S)
    assert spares(fleet) == ()


def test_a_cordon_ends_a_return_that_was_under_way() -> None:
    fleet = training()
    xid(fleet, "n2")
    boot(fleet, "n2")
    fleet.fold(NodeCordonRequested(fleet.now, "n2", True, "to the workshop"))
    fleet.wait(10 * DAY_S)
    assert spares(fleet) == ()
    assert "to the workshop" in node_of(fleet, "n2").unschedulable_reason


def test_an_operator_ends_a_hold_down() -> None:
    fleet = training()
    xid(fleet, "n2")
    boot(fleet, "n2")
    fleet.fold(NodeCordonRequested(fleet.now, "n2", False, "I looked"))
    assert spares(fleet) == ("n2",)
    assert ReturnDue("n2") not in fleet.state.timers


def test_a_hold_down_survives_its_leader_and_uses_the_rules_of_the_new_one() -> None:
    fleet = training()
    xid(fleet, "n2")
    boot(fleet, "n2")
    fleet.fold(LeaderStarted(fleet.now, 2, "secret", ReturnRules(probation_s=60.0)))
    for node in ("n0", "n1", "n2"):
        fleet.hello(node)
    fleet.wait(HOLD - 1)
    assert spares(fleet) == ()
    fleet.wait(1)
    assert spares(fleet) == ("n2",)
    fleet.wait(60)
    assert standing(fleet, "n2") == ""


def test_the_clock_of_a_node_does_not_matter() -> None:
    fleet = training()
    xid(fleet, "n2")
    boot(fleet, "n2", tests=False)
    fleet.report("n2", orders.Tested(Preflight(5.0, 0.5)))  # its clock is decades behind
    fleet.wait(HOLD + 1)
    assert spares(fleet) == ("n2",)


def test_two_faults_at_once_are_cured_by_what_cures_the_worse_one() -> None:
    loss = Removal("lost", 1.0, Cure.RETURN)
    dead = Removal("Xid 79", 2.0, Cure.REBOOT, hardware=True, boot_id="a")
    for both in (holddown.merged(loss, dead), holddown.merged(dead, evolve(loss, boot_id="a"))):
        assert (both.cause, both.cure, both.hardware, both.boot_id) == ("Xid 79", Cure.REBOOT, True, "a")
    assert Probation(1.0, 2.0, "").covers(fault(2.0))
    assert not Probation(1.0, 2.0, "").covers(fault(1.0)), "the fault that it follows"


def test_the_only_spare_is_used_at_once_though_it_is_on_probation() -> None:
    fleet = training()
    lose(fleet, "n1")
    boot(fleet, "n1")
    fleet.lose("n0")
    assert "n1" in fleet.orders(Prepare)


def test_an_event_elsewhere_looks_at_no_node_that_is_on_its_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a storm there are thousands of them, and each event looked at each."""
    fleet = training(dp=1, spares=4)
    for node in ("n2", "n3", "n4"):
        xid(fleet, node)
    for node in ("n2", "n3"):
        boot(fleet, node)
    looked, review = list[str](), returns.review

    def noting(turn: Turn, name: str) -> None:
        looked.append(name)
        review(turn, name)

    monkeypatch.setattr(returns, "review", noting)
    fleet.train(3)
    xid(fleet, "n1")
    assert set(looked) <= {"n0", "n1"}
    boot(fleet, "n4")
    assert set(looked) <= {"n0", "n1", "n4"}
    fleet.wait(HOLD + 1)
    assert {"n2", "n3", "n4"} <= set(spares(fleet))
    assert {"n2", "n3", "n4"} <= set(looked)
