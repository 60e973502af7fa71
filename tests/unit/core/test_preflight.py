"""Which nodes get ranks follows from their tests of themselves, as long as no job's workers are on them."""

from __future__ import annotations

from fleet import Fleet, job, running

from holdfast.domain import orders
from holdfast.domain.findings import FindingKind, Severity
from holdfast.domain.incidents import ActionKind
from holdfast.domain.nodes import Check, NodeState, Preflight
from holdfast.domain.orders import Hello, OrderDone, Prepare
from holdfast.supervisor.protocol import JobPhase

UNDER_WAY = Preflight()
WELL = Preflight(1.0, 0.5, (Check("disk", True, "9 GB free"), Check("peers", None, "no other node is known yet")))
FULL = Preflight(1.0, 0.5, (Check("disk", False, "/data is 99% full"),))


def join(fleet: Fleet, node: str, preflight: Preflight | None) -> None:
    fleet.life[node] = fleet.life.get(node, 0) + 1
    fleet.seq[node] = 0
    fleet.report(node, Hello(fleet.facts(node), (), preflight))


def test_a_node_that_is_testing_itself_gets_no_ranks_until_it_has_passed() -> None:
    fleet = Fleet(2)
    join(fleet, "n2", UNDER_WAY)
    fleet.submit(job(dp=3))
    assert not fleet.orders(Prepare)
    fleet.report("n2", orders.Tested(WELL))
    assert fleet.job.phase is JobPhase.PREPARING
    assert fleet.nodes() == ("n0", "n1", "n2")


def test_a_node_that_failed_is_not_chosen_and_says_why_until_it_passes() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.report("n3", orders.Tested(FULL))
    assert fleet.state.nodes["n3"].state == "cordoned"
    assert fleet.state.nodes["n3"].unfit == "disk: /data is 99% full"
    fleet.lose("n1")
    assert "n3" not in fleet.nodes()
    fleet.report("n3", orders.Tested(WELL))
    assert fleet.state.nodes["n3"].state is NodeState.SPARE


def test_a_node_that_does_not_test_itself_is_used_as_ever() -> None:
    fleet = running(job(dp=3), spares=1)
    assert fleet.state.nodes["n3"].preflight is None
    fleet.lose("n1")
    assert fleet.nodes() == ("n0", "n3", "n2")


def test_a_member_that_comes_back_and_has_not_tested_itself_yet_keeps_its_ranks() -> None:
    fleet = running(job(dp=3), spares=0)
    join(fleet, "n1", UNDER_WAY)
    assert fleet.nodes() == ("n0", "n1", "n2"), "a test must not cost a replica"
    fleet.run()
    assert fleet.job.phase is JobPhase.RUNNING


def test_a_running_node_is_not_taken_out_by_a_late_result() -> None:
    fleet = running(job(dp=3), spares=1)
    number = fleet.job.number
    fleet.report("n1", orders.Tested(FULL))
    assert fleet.state.nodes["n1"].state is NodeState.ACTIVE
    assert (fleet.job.phase, fleet.job.number) == (JobPhase.RUNNING, number)


def test_a_result_is_told_again_with_a_new_session() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.gone("n3")
    fleet.report("n3", Hello(fleet.facts("n3"), (), FULL))
    assert fleet.state.nodes["n3"].preflight == FULL
    assert fleet.state.nodes["n3"].state is NodeState.CORDONED


# ---------------------------------------------------------------- suspicion


def test_when_nobody_is_named_every_node_tests_itself_and_the_one_that_fails_is_replaced() -> None:
    fleet = running(job(dp=2), spares=1)
    fleet.now += 5
    for step in (10, 20):
        fleet.train(step, save=True)
    fleet.train(25)
    fleet.find(FindingKind.SILENT_CORRUPTION, severity=Severity.ERROR, verified_step="15")
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == 10
    asked = fleet.orders(Prepare)
    assert all(isinstance(order, Prepare) and order.self_test for order in asked.values())
    send = next(send for send in fleet.sent if send.node == "n1" and isinstance(send.order, Prepare))
    fleet.report("n1", OrderDone(send.command_id, False, "n1 computes wrongly", at=fleet.now))
    fleet.find(FindingKind.SILENT_CORRUPTION, "n1", severity=Severity.FATAL)
    assert fleet.nodes() == ("n0", "n2")
    assert fleet.job.generation.restore.step == 10
    fleet.run()
    assert fleet.job.phase is JobPhase.RUNNING
    assert fleet.state.nodes["n1"].state is NodeState.CORDONED


def test_a_named_node_is_replaced_and_the_others_lose_no_time() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.train(10, save=True)
    fleet.find(FindingKind.SILENT_CORRUPTION, "n1", rank=1, severity=Severity.FATAL, verified_step="12")
    assert fleet.incident.action is not None
    assert (fleet.incident.action.kind, fleet.nodes()) == (ActionKind.HOT_SWAP, ("n0", "n3", "n2"))
    assert not any(order.self_test for order in fleet.orders(Prepare).values() if isinstance(order, Prepare))


def test_a_loss_that_stays_nan_bounds_what_is_restored_later() -> None:
    fleet = running(job(dp=2))
    for step in (10, 20):
        fleet.train(step, save=True)
    fleet.find(FindingKind.NUMERICAL, severity=Severity.ERROR, verified_step="14")
    assert fleet.job.phase is JobPhase.RUNNING, "the policy decides what becomes of the run"
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    assert fleet.job.generation is not None
    assert fleet.job.generation.restore.step == 10
