"""The findings of the liveness detector: a lost node, and the withdrawal of such a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.diagnostics.detectors.liveness_state import TrackedNode
from holdfast.diagnostics.roster import Placement
from holdfast.domain.findings import DATED, ESTIMATE, Finding, FindingKind, Remedy, Severity

NAMED_MAX = 32  # nodes in the evidence


def withdraw(node: TrackedNode, now: float) -> tuple[Finding, ...]:
    """Withdraw the loss of a node whose agent has reconnected."""
    reported, node.lost = node.lost, ()
    return tuple(
        Finding(
            id=f"{lost.id}:back:{now:.3f}",
            kind=FindingKind.NODE_LOST,
            severity=Severity.INFO,
            at=now,
            since=now,
            summary=f"Node {lost.node} has reconnected with the same agent: it was not lost.",
            node=lost.node,
            job=lost.job,
            generation=lost.generation,
            contradicts=lost.id,
            evidence={"contradicts": lost.id, "incarnation": node.incarnation, "away_s": f"{now - lost.since:.3f}"},
        )
        for lost in reported
    )


def node_lost(
    name: str,
    node: TrackedNode,
    running: Mapping[str, Placement],
    since: float,
    why: str,
    *,
    confidence: float,
    now: float,
    witnesses: Sequence[str] = (),
) -> tuple[Finding, ...]:
    """One finding per job that the node ran; for an idle node, one warning without a job."""
    evidence = {"incarnation": node.incarnation, "last_beat": f"{since:.3f}", "silent_s": f"{now - since:.3f}"}
    evidence[DATED] = f"{ESTIMATE}its last sign of life"
    if witnesses:
        evidence["witnesses"] = ", ".join(witnesses[:NAMED_MAX])
    findings = []
    for job, placement in sorted(running.items()) or [("", Placement(0, ()))]:
        generation, ranks = placement.generation, placement.ranks
        lost = f" with rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:16]))} of {job}" if job else ""
        findings.append(
            Finding(
                id=f"node_lost:{name}:{node.incarnation}:{job}:{generation}:{since:.0f}",
                kind=FindingKind.NODE_LOST,
                severity=Severity.ERROR if job else Severity.WARNING,
                at=now,
                since=min(since, now),
                summary=f"Node {name} is lost{lost}: {why}.",
                node=name,
                job=job,
                generation=generation,
                rank=ranks[0] if len(ranks) == 1 else None,
                confidence=confidence,
                evidence=evidence,
                recommended_actions=(Remedy.REPLACE_NODE,) if job else (Remedy.WATCH,),
            )
        )
    return tuple(findings)


def first_names(names: Sequence[str], count: int) -> str:
    return ", ".join(names[:3]) + (f" and {count - 3} more nodes" if count > 3 else "")
