"""Who is suspected and tests itself while it prepares, and what follows from the result. Every fold goes through a snapshot."""

from __future__ import annotations

from typing import Any

import pytest
from fleet import JOB, Fleet, job

from holdfast.domain import orders
from holdfast.domain.evolve import evolve
from holdfast.domain.findings import STOPPED, FindingKind, Remedy, Severity
from holdfast.domain.incidents import ActionKind, IncidentState
from holdfast.domain.job import JobSpec
from holdfast.domain.nodes import Check, NodeState, Preflight
from holdfast.domain.orders import OrderDone, Prepare, Start
from holdfast.policy import hot_swap, restart
from holdfast.supervisor.core.rules.holddown import Cure, Probation
from holdfast.supervisor.protocol import JobPhase, NodeRepaired

WRONG = Check("products", False, "1 of 90 tf32 products are wrong")
BROKEN = Check("devices", False, "cuda:0: CUDA error: uncorrectable ECC error encountered")
FINE = Check("products", True, "90 exact products on cuda:0")
LATE = Check("products", None, "not concluded within 2 s")
SEGFAULT: dict[str, Any] = {"blame": "unknown", "error_class": "crash", "signal": "11"}


def running(spec: JobSpec, spares: int = 0, *, decide: bool = True) -> Fleet:
    fleet = Fleet(spec.nodes + spares, capacity=spec.nproc_per_node, decide=decide)
    fleet.submit(spec)
    fleet.run()
    fleet.train(20, save=True)
    fleet.now += 1.0
    return fleet


def suspects(fleet: Fleet) -> dict[str, float]:
    """Nodes that are to test themselves, and for how long."""
    budgets = {
        node: order.suspect_test_s for node, order in fleet.orders(Prepare).items() if isinstance(order, Prepare)
    }
    return {node: seconds for node, seconds in budgets.items() if seconds}


def finds(fleet: Fleet, node: str, *checks: Check) -> None:
    """`node` answers its Prepare with what its tests have found."""
    result = Preflight(fleet.now, 0.5, checks)
    send = next(send for send in fleet.sent if send.node == node and isinstance(send.order, Prepare))
    master = f"{node}:29500" if send.order.placement.first_rank == 0 else ""  # type: ignore[union-attr]
    ok = not result.failures
    answer = OrderDone(send.command_id, ok, result.failures, master, fleet.now, tested=result)
    fleet.report(node, answer)


# ---------------------------------------------------------------- who is suspected


@pytest.mark.parametrize(
    ("kind", "evidence"),
    [
        (FindingKind.WORKER_CRASH, SEGFAULT),
        (FindingKind.WORKER_CRASH, {"blame": "hardware", "error_class": "crash", "signal": "6"}),
        (FindingKind.WORKER_EXCEPTION, {"blame": "hardware", "error_class": "script"}),
        (FindingKind.WORKER_EXCEPTION, {"blame": "unknown", "error_class": "device"}),
        (FindingKind.WORKER_EXCEPTION, {"blame": "unknown", "error_class": "node"}),
        (FindingKind.GPU_ERROR, {}),
        (FindingKind.STORAGE_FAULT, {}),
        (FindingKind.HANG, {}),
    ],
)
def test_a_fault_that_may_be_the_nodes_suspects_it(kind: FindingKind, evidence: dict[str, Any]) -> None:
    fleet = running(job(dp=3), decide=False)
    fleet.find(kind, "n1", rank=1, **evidence)
    fleet.answer(restart("on the same nodes"))
    assert suspects(fleet) == {"n1": 2.0}


@pytest.mark.parametrize(
    ("kind", "evidence"),
    [
        (FindingKind.WORKER_CRASH, {"signal": "9", "blame": "unknown", "error_class": "crash"}),
        (FindingKind.WORKER_CRASH, {"blame": "unknown", "error_class": "crash"}),  # an exit code
        (FindingKind.WORKER_EXCEPTION, {"blame": "unknown", "error_class": "script"}),
        (FindingKind.WORKER_EXCEPTION, {"blame": "user", "error_class": "device"}),
        (FindingKind.WORKER_EXCEPTION, {"blame": "unknown", "error_class": "storage"}),
        (FindingKind.HANG, {"reason": f"its {STOPPED}"}),
        (FindingKind.RANKS_MISSING, {}),
    ],
)
def test_what_was_done_to_a_node_and_what_is_the_scripts_suspects_nobody(
    kind: FindingKind, evidence: dict[str, Any]
) -> None:
    fleet = running(job(dp=3))
    fleet.find(kind, "n1", rank=1, **evidence)
    assert fleet.orders(Prepare)
    assert suspects(fleet) == {}


def test_killed_twice_is_killed_twice() -> None:
    fleet = running(job(dp=3))
    for _ in range(3):
        fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1, signal="9", blame="unknown", error_class="crash")
        assert suspects(fleet) == {}
        fleet.run()
        fleet.now += 10.0


def test_a_second_exception_on_one_node_suspects_it_and_one_long_after_does_not() -> None:
    exception: dict[str, Any] = {"blame": "unknown", "error_class": "script"}
    fleet = running(job(dp=3))
    fleet.find(FindingKind.WORKER_EXCEPTION, "n1", rank=1, **exception)
    fleet.run()
    fleet.train(30, save=True)
    fleet.wait(60.0)
    fleet.find(FindingKind.WORKER_EXCEPTION, "n0", rank=0, **exception)
    assert suspects(fleet) == {}, "another node"
    fleet.run()
    fleet.train(40, save=True)
    fleet.wait(60.0)
    fleet.find(FindingKind.WORKER_EXCEPTION, "n1", rank=1, **exception)
    assert suspects(fleet) == {"n1": 2.0}
    fleet.run()
    fleet.train(50, save=True)
    fleet.wait(601.0)
    fleet.find(FindingKind.WORKER_EXCEPTION, "n1", rank=1, **exception)
    assert suspects(fleet) == {}


def test_a_hang_of_which_nobody_is_the_cause_suspects_every_node() -> None:
    fleet = running(job(dp=3))
    fleet.find(FindingKind.HANG)
    assert suspects(fleet) == {"n0": 2.0, "n1": 2.0, "n2": 2.0}


def test_a_first_start_and_a_planned_change_suspect_nobody() -> None:
    fleet = Fleet(3)
    fleet.submit(job(dp=2))
    assert suspects(fleet) == {}


@pytest.mark.parametrize(("seconds", "wanted"), [(0.0, {}), (5.0, {"n1": 5.0}), (9.0, {"n1": 5.0})])
def test_the_job_says_how_long_but_not_longer_than_preparing_may_take(seconds: float, wanted: dict[str, float]) -> None:
    fleet = running(job(dp=3, suspect_test_s=seconds, prepare_timeout_s=10.0))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1, **SEGFAULT)
    assert suspects(fleet) == wanted


def test_a_machine_that_was_booted_is_tested_and_one_whose_agent_restarted_is_not() -> None:
    for boots, wanted in (({"n1": "a"}, {}), ({"n1": "b"}, {"n1": 2.0})):
        fleet = Fleet(3)
        fleet.boots = {"n1": "a"}
        fleet.hello("n1")
        fleet.submit(job(dp=3))
        fleet.run()
        fleet.train(20, save=True)
        fleet.boots = dict(boots)
        fleet.now += 1.0
        fleet.connect("n1")
        fleet.inventory("n1")
        fleet.wait(3.0)
        assert "n1" in fleet.orders(Prepare)
        assert suspects(fleet) == wanted


# ---------------------------------------------------------------- what follows


def test_who_fails_is_replaced_in_the_same_change() -> None:
    fleet = running(job(dp=3), spares=1, decide=False)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1, **SEGFAULT)
    fleet.answer(restart("try again"))
    finds(fleet, "n1", FINE, BROKEN)
    assert fleet.questions == [], "the policy is not asked again"
    assert set(fleet.nodes()) == {"n0", "n2", "n3"}
    assert suspects(fleet) == {}
    assert not fleet.orders(Start)
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert len(fleet.state.breaker.changes) == 2, "the first start, and one change"
    incident = fleet.incident
    assert (incident.state, incident.action and incident.action.kind) == (IncidentState.RESOLVED, ActionKind.RESTART)
    assert incident.evidence["self_test"] == f"n1 failed (devices: {BROKEN.detail})"
    node = fleet.state.nodes["n1"]
    assert "failed the tests that a suspected node makes: devices: cuda:0" in node.unschedulable_reason
    assert node.removal is not None
    assert (node.removal.hardware, node.removal.cure) == (True, Cure.RETURN)
    assert [fault.weight for fault in node.faults] == [1.0]
    assert node.state is NodeState.CORDONED


def test_without_a_spare_a_replica_leaves() -> None:
    fleet = running(job(dp=3, min_dp=2))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1, **SEGFAULT)
    finds(fleet, "n1", BROKEN)
    assert set(fleet.nodes()) == {"n0", "n2"}
    fleet.run()
    fleet.expect(JobPhase.RUNNING)


def test_without_enough_nodes_the_job_waits_for_the_repair() -> None:
    fleet = running(job(dp=2, min_dp=2))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1, **SEGFAULT)
    finds(fleet, "n1", BROKEN)
    fleet.answer_orders()
    fleet.wait(30.0)
    fleet.expect(JobPhase.WAITING)
    fleet.fold(NodeRepaired(fleet.now, "n1"))
    fleet.run()
    fleet.expect(JobPhase.RUNNING)


def test_a_failed_rung_is_followed_by_the_next() -> None:
    fleet = running(job(dp=3), spares=1, decide=False)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1, **SEGFAULT)
    fleet.answer(restart("try again").otherwise(hot_swap("then a spare", "n1")))
    finds(fleet, "n1", BROKEN)
    assert fleet.questions == []
    fleet.run()
    assert set(fleet.nodes()) == {"n0", "n2", "n3"}
    assert [rung.end for rung in fleet.incident.walk] == ["failed", "done"]


def test_a_test_that_was_not_concluded_or_passed_delays_nothing() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.find(FindingKind.HANG)
    finds(fleet, "n0", FINE)
    finds(fleet, "n1", LATE)
    finds(fleet, "n2", FINE)
    assert fleet.orders(Start)
    fleet.run()
    assert fleet.nodes() == ("n0", "n1", "n2")
    said = fleet.incident.evidence["self_test"]
    assert said == "n0 passed; n1 not concluded (products: not concluded within 2 s); n2 passed"
    assert not fleet.state.nodes["n1"].unschedulable_reason


def test_an_agent_that_does_not_know_the_order_prepares_as_ever() -> None:
    fleet = running(job(dp=3))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1, **SEGFAULT)
    fleet.run()
    fleet.expect(JobPhase.RUNNING)
    assert "self_test" not in fleet.incident.evidence


@pytest.mark.parametrize("wrong", [WRONG, Check("links", False, "17 elements of an all-reduce are wrong")])
def test_who_computes_wrongly_comes_back_only_by_an_operator(wrong: Check) -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1, **SEGFAULT)
    finds(fleet, "n1", wrong)
    removal = fleet.state.nodes["n1"].removal
    assert removal is not None
    assert removal.cure is Cure.OPERATOR


def test_a_failure_in_an_answer_that_is_no_longer_wanted_counts_and_counts_once() -> None:
    fleet = running(job(dp=3), spares=2)
    fleet.find(FindingKind.HANG)
    old = next(send for send in fleet.sent if send.node == "n1")
    finds(fleet, "n0", BROKEN)  # the change is planned again, and n1's order is withdrawn
    assert "n1" in fleet.nodes()
    late = OrderDone(old.command_id, False, "failed", at=fleet.now, tested=Preflight(fleet.now - 0.1, 0.5, (BROKEN,)))
    fleet.report("n1", late)
    assert set(fleet.nodes()) == {"n2", "n3", "n4"}
    fleet.fold(NodeRepaired(fleet.now, "n1"))
    fleet.report("n1", late)
    assert not fleet.state.nodes["n1"].unschedulable_reason, "an operator has spoken since"


def test_a_node_that_fails_its_tests_on_probation_is_sent_away() -> None:
    fleet = running(job(dp=3), spares=1)
    node = fleet.state.nodes["n1"]
    probation = Probation(fleet.now - 10.0, fleet.now + 1000.0, "an earlier fault")
    fleet.state = evolve(fleet.state, nodes={**fleet.state.nodes, "n1": evolve(node, probation=probation)}, index=None)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1, **SEGFAULT)
    finds(fleet, "n1", BROKEN)
    removal = fleet.state.nodes["n1"].removal
    assert removal is not None
    assert removal.final.startswith("second fault on probation")


def test_a_node_comes_back_when_it_passes_its_tests_after_the_hold_down() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.report("n1", orders.Tested(Preflight(fleet.now, 1.0, (FINE,))))
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1, **SEGFAULT)
    finds(fleet, "n1", BROKEN)
    fleet.run()
    assert fleet.state.nodes["n1"].unfit
    fleet.wait(700.0)
    assert fleet.state.nodes["n1"].unschedulable_reason, "its hold-down is over, and it has not passed yet"
    fleet.report("n1", orders.Tested(Preflight(fleet.now, 1.0, (FINE,))))
    fleet.wait(1.0)
    node = fleet.state.nodes["n1"]
    assert (node.unschedulable_reason, node.probation is not None, node.state) == ("", True, NodeState.SPARE)


def test_a_fault_that_kills_the_card_is_not_tested_but_replaced() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.find(
        FindingKind.GPU_ERROR, "n1", severity=Severity.FATAL, generation=0, recommended_actions=(Remedy.REPLACE_NODE,)
    )
    assert set(fleet.nodes()) == {"n0", "n2", "n3"}
    assert suspects(fleet) == {}
    assert fleet.state.jobs[JOB].change is not None
