"""Nodes that were lost and come back: when the loss costs them a hold-down, and who gets them meanwhile."""

from __future__ import annotations

from returning import HOLD, PROBATION, UNDER_WAY, boot, lose, node_of, off, result, spares, standing, training

from holdfast.domain.findings import FindingKind
from holdfast.domain.nodes import NodeState
from holdfast.domain.orders import Hello
from holdfast.supervisor.protocol import (
    JobPhase,
    NodeChanged,
)
from holdfast.supervisor.return_rules import DAY_S


def test_the_first_loss_costs_no_hold_down() -> None:
    fleet = training()
    lose(fleet, "n1")
    boot(fleet, "n1")
    assert spares(fleet) == ("n1",)
    assert "on probation until" in standing(fleet, "n1")


def test_a_second_loss_after_the_probation_is_held_down_and_tested_afresh() -> None:
    fleet = training(spares=2)
    lose(fleet, "n1")
    boot(fleet, "n1")
    fleet.wait(PROBATION + 1)
    lose(fleet, "n0")
    assert "n1" not in fleet.nodes(), "the one without a fault"
    boot(fleet, "n0")
    fleet.wait(PROBATION + 1)
    lose(fleet, "n2" if "n2" in fleet.nodes() else "n3")
    member = next(name for name in fleet.nodes() if name in ("n0", "n1"))
    fleet.wait(120)
    lose(fleet, member)
    fleet.hello(member)
    state = node_of(fleet, member)
    assert state.state is NodeState.CORDONED
    assert "on hold until" in standing(fleet, member)
    fleet.wait(HOLD + 1)
    assert "until it passes its pre-flight test" in standing(fleet, member), "what it had passed was before its loss"
    result(fleet, member)
    assert node_of(fleet, member).state is NodeState.SPARE


def test_a_job_that_cannot_run_gets_a_node_in_its_hold_down_after_a_loss_at_once() -> None:
    fleet = training(spares=0, min_dp=2)
    for _ in range(2):
        fleet.wait(PROBATION + 1)
        fleet.lose("n1")
        fleet.answer_orders()
        fleet.expect(JobPhase.WAITING)
        boot(fleet, "n1")
        fleet.run()
        fleet.expect(JobPhase.RUNNING)
    assert any(
        isinstance(record, NodeChanged) and "job cannot run without it" in record.reason for record in fleet.records
    )


def test_even_one_that_was_sent_away_after_losses_is_better_than_none() -> None:
    fleet = training(spares=0, min_dp=2)
    for _ in range(2):
        fleet.wait(120)
        fleet.lose("n1")
        fleet.answer_orders()
        boot(fleet, "n1", tests=False)
        if fleet.job.phase is JobPhase.WAITING:
            assert "second fault on probation" in standing(fleet, "n1")
            result(fleet, "n1")
        fleet.run()
        fleet.expect(JobPhase.RUNNING)


def test_a_run_with_fewer_replicas_does_not_take_one_that_was_sent_away() -> None:
    fleet = training(spares=0, min_dp=1)
    fleet.wait(120)
    lose(fleet, "n1")
    boot(fleet, "n1")
    fleet.save_asked()
    fleet.run()
    assert fleet.nodes() == ("n0", "n1")
    fleet.wait(120)
    lose(fleet, "n1")
    boot(fleet, "n1")
    fleet.wait(DAY_S)
    assert fleet.nodes() == ("n0",)
    assert "second fault on probation" in standing(fleet, "n1")


def test_a_node_that_was_only_believed_to_be_lost_is_neither_held_down_nor_on_probation() -> None:
    fleet = training()
    fleet.decide = False
    fleet.lose("n1")
    fleet.hello("n1", running=1)
    fleet.expect(JobPhase.RUNNING)
    assert (node_of(fleet, "n1").removal, node_of(fleet, "n1").probation) == (None, None)
    assert node_of(fleet, "n1").state is NodeState.ACTIVE


def test_an_idle_node_that_goes_and_comes_is_a_spare_as_ever() -> None:
    fleet = training()
    for _ in range(5):
        off(fleet, "n2")
        boot(fleet, "n2")
        assert spares(fleet) == ("n2",)
    assert standing(fleet, "n2") == ""


def test_what_strikes_several_nodes_at_once_puts_none_on_probation() -> None:
    fleet = training(dp=3, spares=3)
    for node in ("n0", "n1"):
        lose(fleet, node)
    for node in ("n0", "n1"):
        boot(fleet, node)
        assert standing(fleet, node) == ""


def test_an_agent_that_starts_again_on_probation_is_no_second_fault() -> None:
    fleet = training(spares=0)
    fleet.wait(120)
    lose(fleet, "n1")
    boot(fleet, "n1")
    fleet.save_asked()
    fleet.run()
    assert fleet.nodes() == ("n0", "n1")
    fleet.life["n1"] += 1
    fleet.seq["n1"] = 0
    fleet.report("n1", Hello(fleet.facts("n1"), (), UNDER_WAY))
    assert node_of(fleet, "n1").faults[-1].agent_only
    assert "second fault" not in fleet.notes()
    assert node_of(fleet, "n1").in_service


def test_a_machine_that_boots_under_its_ranks_keeps_them_and_is_on_probation() -> None:
    fleet = training(spares=0)
    boot(fleet, "n1")
    fleet.run()
    assert fleet.nodes() == ("n0", "n1")
    assert "on probation until" in standing(fleet, "n1")


def test_a_second_fault_that_leaves_the_node_in_place_puts_it_in_quarantine_when_it_can_be_spared() -> None:
    fleet = training(spares=1)
    lose(fleet, "n1")
    boot(fleet, "n1")
    fleet.wait(120)
    lose(fleet, "n0")  # the other spare, n2, is in use
    assert set(fleet.nodes()) == {"n1", "n2"}
    boot(fleet, "n0")
    fleet.wait(120)
    rank = fleet.nodes().index("n1")
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=rank, blame="hardware", error_class="crash")
    assert node_of(fleet, "n1").quarantined
    assert "second fault on probation" in node_of(fleet, "n1").unschedulable_reason
