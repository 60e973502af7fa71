"""Suspected nodes test themselves while they prepare. A node that fails is replaced in the same change.

    incident ──suspected──► Prepare with a budget ──► the agent tests the node beside its preparation
                                                        │ passed, or not concluded in time: the node is prepared
                                                        └ failed: out of service, and the change is planned without it

Theory of operation. The suspects follow from the typed fields of the incidents that a change resolves, whenever it is planned,
so nothing is remembered. A test delays the start by its budget at most, and only where the machine may be the cause. An
incident that was caused from outside (SIGKILL, an injected fault, a stopped process) or by the script has no suspects; these
are also the failures that take a tenth of a second to recover from.

A failed test is evidence against the hardware (returns.py): the node is held down, and comes back on probation when it passes
its tests. A node that computes wrongly comes back only by an operator. A test that was not concluded is no evidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Blamed, FindingKind
from holdfast.domain.generations import Generation
from holdfast.domain.incidents import Incident
from holdfast.domain.job import LimitSpec
from holdfast.domain.nodes import Preflight
from holdfast.domain.numbers import Numbers
from holdfast.policy.default import SUSPECT_WINDOW_S
from holdfast.supervisor.core.fleet import returns
from holdfast.supervisor.core.model.state import Node
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.core.repair import quarantine

EVIDENCE = "self_test"  # key in an incident's evidence: results of the tests of its suspects
EVIDENCE_CHARS_MAX = 500
NAMED_MAX = 4  # nodes that are named individually
_OF_THE_MACHINE = frozenset(
    {
        FindingKind.GPU_ERROR,
        FindingKind.SILENT_CORRUPTION,
        FindingKind.KERNEL_STALL,
        FindingKind.STORAGE_FAULT,
        FindingKind.NETWORK_FAULT,
    }
)
_OF_WORKERS = frozenset({FindingKind.WORKER_CRASH, FindingKind.WORKER_EXCEPTION})
_MAY_REPEAT = frozenset({*_OF_WORKERS, FindingKind.HANG})
_RESULTS = ("products", "links")  # checks whose correct result is known bit for bit
_BUDGET_SHARE_MAX = 0.5  # of the preparation's time limit: a longer test would be late

# ---------------------------------------------------------------- the suspects


def budget_s(limits: LimitSpec) -> float:
    """Time limit of a suspect's tests, in seconds."""
    return min(limits.suspect_test_s, _BUDGET_SHARE_MAX * limits.prepare_timeout_s)


def suspected(turn: Turn, incidents: Iterable[str], generation: Generation) -> Numbers:
    """Slots of this generation whose nodes are suspects of one of these incidents."""
    slots: set[int] = set()
    for incident in (turn.incidents[each] for each in incidents):
        if incident.planned or incident.attribution.from_outside:
            continue
        if incident.kind == FindingKind.HANG and not incident.node:
            return Numbers.below(len(generation.placements))  # no node stands out: any of them may be the cause
        slot = generation.slot_of(incident.node)
        if slot is not None and _suspects(turn, incident, turn.nodes[incident.node]):
            slots.add(slot)
    return Numbers(slots)


def _suspects(turn: Turn, incident: Incident, node: Node) -> bool:
    """Whether this incident, which was not caused from outside, suspects its node."""
    blame, error_class = incident.attribution.blame, incident.attribution.error_class
    if node.reset_at >= incident.fault_at:
        return False  # its GPUs were reset since, and it passed its tests afterwards
    if blame is Blamed.HARDWARE:
        return True
    if blame is Blamed.USER:
        return False
    if incident.kind == FindingKind.NODE_LOST:
        return node.booted_at >= incident.fault_at  # a machine that crashed; a partition is no evidence against it
    if incident.kind in _OF_THE_MACHINE or incident.kind == FindingKind.HANG:
        return True
    if incident.kind in _OF_WORKERS:
        # A signal that no process sends, such as SIGSEGV. An exit code, in contrast, is chosen by the script.
        by_signal = error_class == "crash" and incident.attribution.from_outside is False
        return by_signal or error_class in ("device", "node") or _has_failed_before(turn, incident)
    return False


def _has_failed_before(turn: Turn, incident: Incident) -> bool:
    """Whether this is the second fault of workers on its node within the window, of any job."""
    return any(
        each.node == incident.node
        and each.id != incident.id
        and each.kind in _MAY_REPEAT
        and not each.attribution.from_outside
        and each.attribution.blame is not Blamed.USER
        and 0 <= incident.fault_at - each.fault_at <= SUSPECT_WINDOW_S
        for each in (*turn.closed, *turn.incidents.values())
    )


# ---------------------------------------------------------------- the results


def record(turn: Turn, incidents: Iterable[str], tests: Sequence[tuple[str, Preflight]]) -> None:
    """Add the test results of these nodes to the evidence of these incidents."""
    if not tests:
        return
    results = [_found(node, tested) for node, tested in tests if tested.failures or not _concluded(tested)][:NAMED_MAX]
    passed = [node for node, tested in tests if not tested.failures and _concluded(tested)]
    if len(passed) > NAMED_MAX:
        results.append(f"{len(passed)} nodes passed")
    elif passed:
        results.append(f"{', '.join(passed)} passed")
    for each in incidents:
        if (incident := turn.incidents.get(each)) is not None:
            before = incident.evidence.get(EVIDENCE, "")
            text = "; ".join((before, *results) if before else results)[:EVIDENCE_CHARS_MAX]
            if text != before:
                turn.put_incident(evolve(incident, evidence={**incident.evidence, EVIDENCE: text}))


def _concluded(tested: Preflight) -> bool:
    return all(check.ok is not None for check in tested.checks)


def _found(node: str, tested: Preflight) -> str:
    if tested.failures:
        return f"{node} failed ({tested.failures})"
    open_ = "; ".join(f"{check.name}: {check.detail}" for check in tested.checks if check.ok is None)
    return f"{node} not concluded ({open_})"


def is_known(node: Node, tested: Preflight) -> bool:
    """Whether this failure was handled before: a late answer may come twice, and an operator may have repaired the node in
    between."""
    return tested.at == node.failed_test_at


def condemn(turn: Turn, name: str, tested: Preflight, incidents: Sequence[str]) -> None:
    """The node failed its tests: take it out of service."""
    node = turn.nodes[name]
    turn.put_node(name, failed_test_at=tested.at, preflight=tested if node.preflight is not None else None)
    cause = f"failed the tests that a suspected node makes: {tested.failures}"
    computes_wrongly = any(check.name in _RESULTS and check.ok is False for check in tested.checks)
    returns.failed_test(turn, name, cause, computes_wrongly=computes_wrongly)
    incident = next((each for each in incidents if each in turn.incidents), "")
    if incident:
        quarantine.count_failed_test(turn, turn.incidents[incident], name)
    turn.note(name, cause)
