"""Which nodes get ranks follows from their tests of themselves, as long as no job's workers are on them."""

from __future__ import annotations

import pytest
from fleet import Fleet, job, running

from holdfast.domain import orders
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.incidents import ActionKind
from holdfast.domain.nodes import Check, NodeState, Preflight
from holdfast.domain.orders import Hello, OrderDone, Prepare
from holdfast.supervisor.core.fleet import returns
from holdfast.supervisor.core.rules.holddown import Cure
from holdfast.supervisor.protocol import (
    FindingArrived,
    FindingJudged,
    JobPhase,
    NodeCordonRequested,
    NodeRepaired,
    Publish,
)
from holdfast.supervisor.return_rules import ReturnRules

RULES = ReturnRules()
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


def test_a_result_is_reported_again_with_a_new_session() -> None:
    fleet = running(job(dp=3), spares=1)
    fleet.gone("n3")
    fleet.report("n3", Hello(fleet.facts("n3"), (), FULL))
    assert fleet.state.nodes["n3"].preflight == FULL
    assert fleet.state.nodes["n3"].state is NodeState.CORDONED


# ---------------------------------------------------------------- nodes without ranks


def result(fleet: Fleet, node: str, *, ok: bool) -> None:
    checks = WELL.checks if ok else FULL.checks
    fleet.wait(1.0)  # what tests take
    fleet.report(node, orders.Tested(Preflight(fleet.now, 0.5, checks)))


def spares(fleet: Fleet) -> tuple[str, ...]:
    return fleet.view.spares


def flaps(fleet: Fleet, node: str, times: int) -> None:
    """Fails its tests and passes them a minute later, so many times; then it fails once more."""
    for _ in range(times):
        result(fleet, node, ok=False)
        fleet.wait(60.0)
        result(fleet, node, ok=True)
        fleet.wait(1800.0)
        fleet.train(fleet.job.progress.step + 1)
    result(fleet, node, ok=False)


def standing(fleet: Fleet, node: str) -> str:
    return returns.standing(fleet.state.nodes[node], fleet.now, RULES.probation_s)


def test_a_finding_about_a_node_without_ranks_opens_no_incident_and_says_what_follows() -> None:
    fleet = running(job(dp=3), spares=1)
    result(fleet, "n3", ok=False)
    summary = "n3 failed its pre-flight and gets no ranks (disk: /data is 99% full)."
    finding = Finding("preflight:n3:1", FindingKind.PREFLIGHT, Severity.WARNING, fleet.now, fleet.now, summary, "n3")
    commands = fleet.fold(FindingArrived(fleet.now, finding))
    assert not fleet.state.incidents, "no job has ranks there, so there is no policy to ask"
    judged = [each.record for each in commands if isinstance(each, Publish) and isinstance(each.record, FindingJudged)]
    assert [each.verdict for each in judged] == [
        "recorded: no job has ranks on n3, so no policy is asked; it gets none until it passes its tests"
    ]


def test_a_node_that_fails_its_tests_now_and_then_comes_back_with_the_next_good_one() -> None:
    fleet = running(job(dp=3), spares=1)
    flaps(fleet, "n3", RULES.test_failures_free - 1)
    fleet.wait(60.0)
    result(fleet, "n3", ok=True)
    assert fleet.state.nodes["n3"].state is NodeState.SPARE
    assert spares(fleet) == ("n3",)


def test_a_node_that_fails_and_passes_by_turns_is_held_down_after_the_test_that_it_passes() -> None:
    fleet = running(job(dp=3), spares=1)
    flaps(fleet, "n3", RULES.test_failures_free)
    removal = fleet.state.nodes["n3"].removal
    assert removal is not None
    assert (removal.cure, removal.hardware, removal.back_at) == (Cure.TESTS, False, None)
    assert "when it passes its pre-flight test" in standing(fleet, "n3")
    assert not fleet.state.breaker.failed_nodes, "a node without ranks that tests itself is no failure of the fleet"
    fleet.wait(60.0)
    result(fleet, "n3", ok=True)
    node = fleet.state.nodes["n3"]
    assert (node.state, spares(fleet)) == (NodeState.CORDONED, ())
    assert standing(fleet, "n3").startswith("on hold until")
    assert standing(fleet, "n3").endswith("passed in between; then a spare")
    assert not node.faults, "no fault was counted"
    fleet.wait(RULES.hold_s + 1)
    assert fleet.state.nodes["n3"].state is NodeState.SPARE
    assert fleet.state.nodes["n3"].probation is None


def test_a_failed_test_in_the_hold_down_begins_it_anew() -> None:
    fleet = running(job(dp=3), spares=1)
    flaps(fleet, "n3", RULES.test_failures_free)
    result(fleet, "n3", ok=True)
    fleet.wait(RULES.hold_s - 60.0)
    result(fleet, "n3", ok=False)
    fleet.wait(120.0)
    assert spares(fleet) == ()
    result(fleet, "n3", ok=True)
    fleet.wait(RULES.hold_s - 60.0)
    assert spares(fleet) == ()
    fleet.wait(61.0)
    assert spares(fleet) == ("n3",)


def test_a_test_that_continues_to_fail_and_a_repeated_result_count_once() -> None:
    fleet = running(job(dp=3), spares=1)
    for _ in range(10):
        result(fleet, "n3", ok=False)
        join(fleet, "n3", UNDER_WAY)  # its agent starts again
        fleet.wait(60.0)
    assert fleet.state.nodes["n3"].test_failures == (fleet.state.nodes["n3"].test_failures[0],)
    result(fleet, "n3", ok=True)
    assert spares(fleet) == ("n3",)


def test_a_job_that_cannot_run_without_it_gets_it_in_its_hold_down() -> None:
    fleet = running(job(dp=3, min_dp=3), spares=1)
    flaps(fleet, "n3", RULES.test_failures_free)
    result(fleet, "n3", ok=True)
    assert spares(fleet) == ()
    fleet.lose("n1")
    assert fleet.nodes() == ("n0", "n3", "n2")


def test_no_job_gets_it_while_its_tests_fail() -> None:
    fleet = running(job(dp=3, min_dp=3), spares=1)
    flaps(fleet, "n3", RULES.test_failures_free)
    fleet.lose("n1")
    assert fleet.job.phase is JobPhase.WAITING
    result(fleet, "n3", ok=True)
    assert fleet.nodes() == ("n0", "n3", "n2")


@pytest.mark.parametrize("word", ["repair", "uncordon"])
def test_an_operator_ends_its_hold_down(word: str) -> None:
    fleet = running(job(dp=3), spares=1)
    flaps(fleet, "n3", RULES.test_failures_free)
    result(fleet, "n3", ok=True)
    if word == "repair":
        fleet.fold(NodeRepaired(fleet.now, "n3"))
        assert fleet.state.nodes["n3"].test_failures == ()
    else:
        fleet.fold(NodeCordonRequested(fleet.now, "n3", cordoned=False, reason="looked at it"))
    assert spares(fleet) == ("n3",)


def test_a_node_with_ranks_is_not_held_down_for_a_late_result() -> None:
    fleet = running(job(dp=3), spares=1)
    for _ in range(5):
        result(fleet, "n1", ok=False)
        result(fleet, "n1", ok=True)
    assert fleet.state.nodes["n1"].removal is None
    assert fleet.state.nodes["n1"].test_failures == ()


# ---------------------------------------------------------------- suspicion


def test_when_nobody_is_named_every_node_result_and_the_one_that_fails_is_replaced() -> None:
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
