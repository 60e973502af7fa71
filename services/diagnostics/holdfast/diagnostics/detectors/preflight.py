"""Reports the results of a node's pre-flight test. A wrong matrix product takes the node out of service. Other failures are
reported, and the supervisor gives the node no ranks while they last.

A node tests itself when it joins, when it has become idle, at intervals, and when a job's state is corrupt and no node could
be named. Its exact matrix products have one correct result. A device with another result corrupts any training, so the node is
not used again until an operator has checked it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.protocol import Findings, Observed
from holdfast.diagnostics.roster import Roster
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.nodes import Check
from holdfast.domain.signals import NodeTested

PRODUCTS = "products"
_NODES_MAX = 50_000


@dataclass(slots=True)
class PreflightState:
    # Node → failed checks of the last test.
    failing: Bounded[str, tuple[str, ...]] = field(default_factory=lambda: Bounded(_NODES_MAX))


@dataclass(frozen=True, slots=True)
class Preflight:
    """Reports SILENT_CORRUPTION for a wrong product, and PREFLIGHT, a warning, for other failures, once until they change."""

    reads: ClassVar = (NodeTested,)
    initial = PreflightState

    def observe(
        self, state: PreflightState, item: Observed, now: float, roster: Roster
    ) -> tuple[PreflightState, Findings]:
        if not isinstance(item, NodeTested):
            return state, ()
        failed = [check for check in item.preflight.checks if check.ok is False]
        names = tuple(sorted(check.name for check in failed))
        before = state.failing.pop(item.node, ())
        if names:
            state.failing[item.node] = names
        found = [_wrong(item, check, now) for check in failed if check.name == PRODUCTS]
        rest = [check for check in failed if check.name != PRODUCTS]
        if names != before and (rest or not names):
            found.append(_changed(item, rest, before, now))
        return state, tuple(found)


def _wrong(item: NodeTested, check: Check, now: float) -> Finding:
    return Finding(
        id=f"preflight:{item.node}:{PRODUCTS}:{item.at:.0f}",
        kind=FindingKind.SILENT_CORRUPTION,
        severity=Severity.FATAL,
        at=now,
        since=min(item.at, now),
        summary=f"{item.node} computes wrong results: {check.detail}.",
        node=item.node,
        confidence=0.99,
        evidence={"rule": "self_test", "check": check.name, "detail": check.detail},
        recommended_actions=(Remedy.REPLACE_NODE,),
    )


def _changed(item: NodeTested, failed: list[Check], before: tuple[str, ...], now: float) -> Finding:
    words = "; ".join(f"{check.name}: {check.detail}" for check in failed)
    summary = (
        f"{item.node} failed its pre-flight test and gets no ranks ({words})."
        if failed
        else f"{item.node} passes its pre-flight test again ({', '.join(before)})."
    )
    return Finding(
        id=f"preflight:{item.node}:{item.at:.0f}",
        kind=FindingKind.PREFLIGHT,
        severity=Severity.WARNING if failed else Severity.INFO,
        at=now,
        since=min(item.at, now),
        summary=summary,
        node=item.node,
        evidence={"rule": "preflight", **{check.name: check.detail for check in item.preflight.checks}},
        recommended_actions=(Remedy.WATCH, Remedy.REBOOT_NODE, Remedy.REPLACE_NODE) if failed else (),
    )
