"""The return of nodes that a fault took out of service.

    fault ──► removed ──cured──► held down ──time over, tests passed──► spare on probation ──time over──► spare
                ▲                    │ a job cannot run without it            │
                │                    └── after a loss only ──────────────────►┤
                └── only an operator brings it back ◄──a second fault of its own

Theory of operation. The consequence of a fault is a value in the node's row, `Node.removal`; `Node.unschedulable_reason` keeps
ranks from the node. `review` compares the two with the state of the node whenever that changes, at the end of the hold-down,
and when another leader begins. Nothing needs to be remembered between a reboot and the tests after it. Deadlines are by the
core's own time. Of the clocks of nodes, only the difference of two test results is used.

A node without ranks that fails its own tests gets none while it fails them. It needs no removal for that, and no job loses a
rank. Only a node that alternately fails and passes has a removal (`tested`).

Not every cause has a removal: an operator's cordon, a policy's `cordon` and a quarantine hold until they are lifted. A node
that was wrongly reported as lost (`contradicted`), or that was lost without ranks, has none either: machines come and go.

After a loss, the hold-down is a preference: a job that cannot run without the node gets it at once (quarantine.py). If there is
evidence against the hardware, the hold-down is strict: such a node would most probably stop the job again.
"""

from __future__ import annotations

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Finding, FindingKind, Remedy
from holdfast.supervisor.core.fleet import nodes
from holdfast.supervisor.core.model.index import By
from holdfast.supervisor.core.model.lifecycle import Deferred, Suspended, Waiting
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.rules import links, offenders
from holdfast.supervisor.core.rules.holddown import (
    REBOOTS_MAX,
    REQUESTS_MAX,
    Cure,
    Probation,
    Removal,
    hold_s,
    merged,
    own,
    second_fault,
)
from holdfast.supervisor.core.rules.wording import moment
from holdfast.supervisor.return_rules import TEST_FAILURES_MAX
from holdfast.supervisor.timers import ReplacementDue, ReturnDue

# ---------------------------------------------------------------- faults


def lost(turn: Turn, name: str, finding: Finding) -> None:
    """The node is lost with ranks of its job. It gets no ranks while it is lost; `review` decides when it has returned."""
    node = turn.nodes[name]
    if not node.unschedulable_reason or node.removal is not None:
        loss = _removal(turn, node, finding.summary, Cure.RETURN, finding=finding.id)
        turn.put_node(name, removal=merged(node.removal, loss))


def condemn(turn: Turn, name: str, finding: Finding) -> None:
    """Take the node out of service because of the finding."""
    # A boot does not repair wrong products, and a test of half a second proves little: an operator must decide.
    cure = Cure.OPERATOR if finding.kind is FindingKind.SILENT_CORRUPTION else Cure.REBOOT
    removal = _removal(turn, turn.nodes[name], finding.summary, cure, hardware=True, finding=finding.id)
    removal = evolve(removal, replace=finding.recommended_actions[:1] == (Remedy.REPLACE_NODE,))
    nodes.mark_unschedulable(turn, name, finding.summary, removal=removal)


def must_reboot(turn: Turn, name: str, cause: str) -> None:
    removal = _removal(turn, turn.nodes[name], cause, Cure.REBOOT, hardware=True)
    nodes.mark_unschedulable(turn, name, cause, removal=removal)


def did_not_stop(turn: Turn, name: str, cause: str) -> None:
    """Take the node out of service, because workers of an older generation may run there."""
    nodes.mark_unschedulable(turn, name, cause, removal=_removal(turn, turn.nodes[name], cause, Cure.STOPPED))


def failed_test(turn: Turn, name: str, cause: str, *, computes_wrongly: bool) -> None:
    """A suspected node failed its tests. It may pass them later: it is held down until then."""
    cure = Cure.OPERATOR if computes_wrongly else Cure.RETURN
    removal = _removal(turn, turn.nodes[name], cause, cure, hardware=True)
    nodes.mark_unschedulable(turn, name, cause, removal=removal)


def failed_links(turn: Turn, name: str, blame: links.Blame) -> None:
    """The network of a node without ranks is bad. If it is only slow, the node is better than none
    (`quarantine.release_for`)."""
    node = turn.nodes[name]
    removal = _removal(turn, node, blame.cause, Cure.LINKS, hardware=blame.failed)
    # The repeated test is the evidence of its return, unless an earlier fault requires the node's own tests.
    tested = node.removal is None or has_passed(node)
    removal = evolve(removal, expected=blame.expected, tested=tested)
    nodes.mark_unschedulable(turn, name, blame.cause, removal=removal)


def tested(turn: Turn, name: str) -> None:
    """A node without ranks has tested itself. If it alternately fails and passes, it is held down when it passes again."""
    node, rules = turn.nodes[name], turn.config.returns
    finished = node.preflight is not None and node.preflight.at > 0
    if not finished or bool(node.unfit) is node.failing or nodes.job_of(turn, name) is not None:
        return
    if node.failing:
        turn.put_node(name, failing=False)
        return
    recent = [at for at in node.test_failures if turn.at - at <= rules.window_s]
    failures = (*recent, turn.at)[-TEST_FAILURES_MAX:]
    node = turn.put_node(name, failing=True, test_failures=failures)
    if len(failures) > rules.test_failures_free:
        failed = f"{len(failures)} failed pre-flight tests" if len(failures) > 1 else "a failed pre-flight test"
        between = ", which it passed in between" if len(failures) > 1 else ""
        _hold_down(turn, name, _removal(turn, node, f"{failed} ({node.unfit}){between}", Cure.TESTS))


def was_reset(turn: Turn, name: str, cause: str) -> None:
    """GPUs of a node without ranks were reset, and the node has passed its tests."""
    removal = _removal(turn, turn.nodes[name], cause, Cure.RETURN, hardware=True)
    _hold_down(turn, name, evolve(removal, tested=True))
    review(turn, name)


def _hold_down(turn: Turn, name: str, removal: Removal) -> None:
    """Hold down a node that has no ranks. No job loses a rank, so unlike `nodes.mark_unschedulable` this counts no failure."""
    node = turn.nodes[name]
    if not node.unschedulable_reason or node.removal is not None:
        turn.put_node(name, unschedulable_reason=removal.cause, removal=merged(node.removal, removal))


def _removal(turn: Turn, node: Node, cause: str, cure: Cure, *, hardware: bool = False, finding: str = "") -> Removal:
    tested_at = node.preflight.at if node.preflight is not None else 0.0
    return Removal(cause, turn.at, cure, hardware, node.facts.boot_id, tested_at, finding=finding)


def is_dealt_with(node: Node, finding: Finding) -> bool:
    """Whether the finding is about a fault from which the node has returned (it may still be held down): it was delivered late,
    or repeated."""
    return is_first_of_fault(node) and any(fault.incident == finding.id for fault in node.faults)


def is_first_of_fault(node: Node) -> bool:
    """Whether a new finding is about another fault, and not about the one that the node is out of service for."""
    return node.removal is None or node.removal.back_at is not None


def contradicted(turn: Turn, name: str) -> None:
    """The node was not lost: it has reconnected with its workers."""
    removal = turn.nodes[name].removal
    if removal is not None and removal.cure is Cure.RETURN and not removal.hardware:
        turn.put_node(name, removal=None, unschedulable_reason="")


def forget(turn: Turn, name: str) -> Node:
    """Clear removal and probation: an operator decided about the node, or it has another machine."""
    turn.cancel_timer(ReturnDue(name))
    turn.cancel_timer(ReplacementDue(name))
    return turn.put_node(name, removal=None, probation=None)


def begin_anew(turn: Turn, name: str, *, unschedulable_reason: str = "") -> None:
    """Clear the node's record: earlier findings no longer apply to it."""
    forget(turn, name)
    turn.put_node(
        name,
        unschedulable_reason=unschedulable_reason,
        quarantined=False,
        faults=(),
        repaired_at=turn.at,
        reset_due=None,
        links=(),
        link_begun_at=0.0,
        failing=False,
        test_failures=(),
    )


def on_restart(turn: Turn, name: str, *, booted: bool) -> None:
    """Its agent has a new incarnation, whose tests are all newer than the fault. `booted`: its machine has another boot id than
    before, so GPUs that were due for a reset have been reset."""
    node = turn.nodes[name]
    if node.removal is not None:
        node = turn.put_node(name, removal=evolve(node.removal, preflight_at=0.0))
    due = node.reset_due
    job = nodes.job_of(turn, name)
    if booted and due is not None and (job is None or isinstance(job.doing, Waiting | Suspended | Deferred)):
        turn.put_node(name, reset_due=None, reset_at=turn.at)
        if node.removal is None:
            _hold_down(turn, name, _removal(turn, node, due.cause, Cure.RETURN, hardware=True))


def on_other_machine(turn: Turn, name: str) -> None:
    """The node has another machine: findings about the previous one no longer apply. An operator's cordon remains."""
    node = turn.nodes[name]
    reason = "" if node.quarantined or node.removal is not None else node.unschedulable_reason
    begin_anew(turn, name, unschedulable_reason=reason)


def failed_under_ranks(turn: Turn, name: str, cause: str) -> None:
    """The machine rebooted before its loss was noticed: its ranks may start there at once, and it is on probation."""
    node = turn.nodes[name]
    active = node.probation is not None and turn.at < node.probation.until
    if node.removal is None and not active and own(node.faults):
        begin_probation(turn, name, cause)


def judge(turn: Turn, name: str) -> None:
    """The faults attributed to the node have changed: decide again whether only an operator may bring it back."""
    node = turn.nodes[name]
    removal = node.removal
    if removal is None:
        return
    final = second_fault(node.probation, node.faults)
    if final and not removal.final:
        turn.put_node(name, removal=evolve(removal, final=final), unschedulable_reason=removal.cause)
        nodes.refresh(turn, name, f"{final}: {removal.cause}")
    elif not final and removal.final.startswith("second fault"):
        turn.put_node(name, removal=evolve(removal, final=""))


# ---------------------------------------------------------------- the way back


def review(turn: Turn, name: str) -> None:
    """Bring the node a step closer to service, if it has met the condition for that."""
    node = turn.nodes[name]
    removal = node.removal
    if removal is None or removal.final or not node.connected or node.lost:
        return
    if removal.back_at is None:
        if not is_cured(turn, node):
            return
        removal = _begin_hold(turn, node, removal)
        node = turn.nodes[name]
    if turn.at < removal.hold_until:
        return
    if removal.cure is Cure.LINKS and not is_cured(turn, node):
        return  # a later test was bad
    if removal.hold_until > (removal.back_at or 0.0) and not has_passed(node):
        return
    if removal.hardware and (offence := offenders.offence(node.faults, turn.at, turn.config.offenders)):
        turn.put_node(name, removal=evolve(removal, final=offence))
        nodes.refresh(turn, name, offence)
        return
    admit(turn, name, "its hold-down is over")


def is_cured(turn: Turn, node: Node) -> bool:
    """Whether everything has happened that its fault requires before the hold-down begins."""
    removal = node.removal
    assert removal is not None
    match removal.cure:
        case Cure.RETURN:
            return True
        case Cure.STOPPED:
            return not turn.group(By.HELD, node.name) and not node.workers
        case Cure.TESTS:
            return has_passed(node)
        case Cure.LINKS:
            return links.is_mended(node.links, removal.at, removal.expected)
        case Cure.REBOOT:
            return "" not in (node.facts.boot_id, removal.boot_id) and node.facts.boot_id != removal.boot_id
        case Cure.OPERATOR:
            return False


def has_passed(node: Node) -> bool:
    """Whether the node has passed its own tests since its fault. A node that runs no tests passes after a mere loss."""
    removal, tested = node.removal, node.preflight
    assert removal is not None
    if tested is None:
        return removal.tested or not removal.hardware
    is_fresh = bool(tested.at) and tested.at != removal.preflight_at
    return (removal.tested or is_fresh) and not node.unfit and not node.untested


def _begin_hold(turn: Turn, node: Node, removal: Removal) -> Removal:
    seconds = hold_s(removal, node.faults, turn.at, turn.config.returns)
    removal = evolve(removal, back_at=turn.at, hold_until=turn.at + seconds)
    turn.put_node(node.name, removal=removal)
    if removal.cure is Cure.REBOOT:
        turn.put_node(node.name, reset_due=None, reset_at=turn.at)
    if seconds > 0:
        turn.put_node(node.name, unschedulable_reason=removal.cause)
        turn.set_timer(ReturnDue(node.name), removal.hold_until)
        nodes.refresh(turn, node.name, standing(turn.nodes[node.name], turn.at, turn.config.returns.probation_s))
    return removal


def admit(turn: Turn, name: str, why: str) -> None:
    """Let the node have ranks. If a fault was its own, it is on probation."""
    node, rules = turn.nodes[name], turn.config.returns
    removal = node.removal
    assert removal is not None
    turn.put_node(name, removal=None, unschedulable_reason="", quarantined=False)
    if any(turn.at - fault.at <= rules.window_s for fault in own(node.faults)):
        begin_probation(turn, name, removal.cause)
    nodes.refresh(turn, name, f"{why}: it may have ranks again after {removal.cause}")


def begin_probation(turn: Turn, name: str, cause: str) -> None:
    probation = Probation(turn.at, turn.at + turn.config.returns.probation_s, cause)
    turn.put_node(name, probation=probation)
    turn.set_timer(ReturnDue(name), probation.until)


def on_timer(turn: Turn, name: str) -> None:
    """The hold-down or the probation is over."""
    node = turn.nodes.get(name)
    if node is not None and node.removal is not None:
        review(turn, name)
    elif node is not None and node.probation is not None and turn.at >= node.probation.until:
        turn.put_node(name, probation=None)
        turn.note(name, "its probation is over, and it had no fault of its own")


# ---------------------------------------------------------------- descriptions


def standing(node: Node, at: float, probation_s: float) -> str:
    """The node's position on its way back to service, and its condition; empty if no fault took it out."""
    parts = _stands(node, at, probation_s), _another_machine(node, at)
    return "; ".join(part for part in parts if part)


def _stands(node: Node, at: float, probation_s: float) -> str:
    removal, probation = node.removal, node.probation
    if removal is None:
        on_probation = probation is not None and at < probation.until
        return (
            f"on probation until {moment(probation.until, at)} after {probation.cause}"
            if probation and on_probation
            else ""
        )
    repair = f"`holdfast nodes repair {node.name}`"
    if removal.final:
        return f"out of service until {repair}: {removal.final}; {removal.cause}"
    if not node.unschedulable_reason:
        return ""
    if removal.back_at is None:
        return f"out of service after {removal.cause}; {_awaited(node, removal, at)} {repair}"
    if removal.cure is Cure.TESTS and not own(node.faults) and at < removal.hold_until:
        return f"on hold until {moment(removal.hold_until, at)} after {removal.cause}; then a spare"
    then = f"then a spare on probation for {max(1, round(probation_s / 60))} min"
    if at < removal.hold_until:
        tests = "" if has_passed(node) else f" and {_tests(node)}"
        until = moment(removal.hold_until + probation_s, at)
        then = f"then a spare on probation until {until}" if not tests else then
        return f"on hold until {moment(removal.hold_until, at)}{tests} after {removal.cause}; {then}"
    return f"its hold-down after {removal.cause} is over; out of service until {_tests(node)}, {then}"


def held_until(node: Node, at: float) -> float | None:
    """When the hold-down of the node ends; None if it is not held down."""
    removal = node.removal
    if removal is None or removal.final or removal.back_at is None or at >= removal.hold_until:
        return None
    return removal.hold_until


def on_probation_until(node: Node, at: float) -> float | None:
    probation = node.probation
    return probation.until if node.removal is None and probation is not None and at < probation.until else None


def comes_back(node: Node) -> bool:
    """Whether a node that is out of service returns by itself, once its machine has done what is needed."""
    removal = node.removal
    if removal is None or removal.final or removal.cure is Cure.OPERATOR:
        return False
    if removal.hardware and node.preflight is None and not removal.tested:
        return False
    return removal.cure is not Cure.REBOOT or bool(removal.boot_id)


def _awaited(node: Node, removal: Removal, at: float) -> str:
    reboot = removal.reboot
    match removal.cure:
        case Cure.REBOOT if reboot is not None and reboot.ordered_at is not None:
            return (
                f"its machine was ordered to boot {at - reboot.ordered_at:.0f} s ago; it comes back after that, or by"
            )
        case Cure.REBOOT if reboot is not None and reboot.failure:
            again = "it is tried again" if reboot.tries < REBOOTS_MAX else "it comes back after a boot by hand"
            return f"its machine could not be booted ({reboot.failure}); {again}, or by"
        case Cure.REBOOT if reboot is not None:
            return f"its machine will be booted, but not while {reboot.waits}; it comes back after that, or by"
        case Cure.RETURN:
            return "it comes back by itself with its agent, or by"
        case Cure.STOPPED:
            return "it comes back by itself when these workers are gone, or by"
        case Cure.TESTS:
            return "it comes back by itself when it passes its pre-flight test, or by"
        case Cure.LINKS:
            return f"it comes back by itself after {links.GOOD_MIN} good tests of its network in a row, or by"
        case Cure.REBOOT if removal.boot_id and (node.preflight is not None or removal.tested):
            return "it comes back by itself when its machine has been booted again and has passed its tests, or by"
        case Cure.REBOOT if removal.boot_id:
            return "its agent makes no tests (HOLDFAST_PREFLIGHT_EVERY_S=0), so it comes back only by"
        case Cure.REBOOT:
            return "its agent does not report the boot id of its machine, so it comes back only by"
        case Cure.OPERATOR:
            return "it comes back only by"


def _another_machine(node: Node, at: float) -> str:
    """The progress of the request for another machine; empty if there is none."""
    request = node.removal.replacement if node.removal is not None else None
    if request is None:
        return ""
    if request.asked_at is not None and not request.failure:
        return f"another machine was requested {at - request.asked_at:.0f} s ago"
    if request.agreed_at is not None:
        answer = f" ({request.answer})" if request.answer else ""
        return f"another machine was requested at {moment(request.agreed_at, at)}, and will come{answer}"
    if request.failure:
        again = "; the request is repeated" if request.asked_at is None and request.tries < REQUESTS_MAX else ""
        return f"another machine was requested, but {request.failure}{again}"
    return f"another machine is not requested yet: {request.waits}"


def _tests(node: Node) -> str:
    if node.unfit:
        return f"it passes its pre-flight test (failed: {node.unfit})"
    return "it passes its pre-flight test" if node.preflight is not None else f"`holdfast nodes repair {node.name}`"
