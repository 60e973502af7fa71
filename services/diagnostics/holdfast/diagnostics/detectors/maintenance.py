"""Reports maintenance notices: the owner of a machine announces that the machine will be taken away.

The finding is a warning with the time. The policy decides whether to save, to replace the node or to wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.protocol import Findings, Observed
from holdfast.diagnostics.roster import Roster
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.nodes import TERMINATION, Notice
from holdfast.domain.signals import MaintenanceNotice

_NOTICES_MAX = 50_000


@dataclass(slots=True)
class NoticeState:
    # (node, source) → the finding's id
    open: Bounded[tuple[str, str], str] = field(default_factory=lambda: Bounded(_NOTICES_MAX))


@dataclass(frozen=True, slots=True)
class Maintenance:
    reads: ClassVar = (MaintenanceNotice,)
    initial = NoticeState
    ttl_s: float = 3600.0  # Google Cloud sends its notice an hour ahead

    def observe(self, state: NoticeState, item: Observed, now: float, roster: Roster) -> tuple[NoticeState, Findings]:
        if not isinstance(item, MaintenanceNotice):
            return state, ()
        key = (item.node, item.source)
        before = state.open.pop(key, "")
        if item.event:
            finding = self._announced(item, now)
            state.open[key] = finding.id
            return state, () if finding.id == before else (finding,)
        return state, (_withdrawn(item, before, now),) if before else ()

    def _announced(self, item: MaintenanceNotice, now: float) -> Finding:
        evidence = {"source": item.source, "event": item.event}
        what = "leaves" if item.source == TERMINATION else "will be taken for maintenance"
        when = "soon"
        if item.starts_at is not None:
            evidence["starts_at"] = f"{item.starts_at:.0f}"
            left_s = item.starts_at - now
            when = f"in {left_s:.0f} s" if left_s > 0 else "now"
        return Finding(
            id=f"maintenance:{item.node}:{item.source}:{item.event[:60]}:{evidence.get('starts_at', '')}",
            kind=FindingKind.MAINTENANCE,
            severity=Severity.WARNING,
            at=now,
            since=min(item.at, now),
            summary=f"{item.node} {what} {when}: {item.event}.",
            node=item.node,
            evidence=evidence,
            notice=Notice(item.source, item.event, now, item.starts_at, item.incarnation),
            recommended_actions=(Remedy.REPLACE_NODE,),
            ttl_s=self.ttl_s,
        )


def _withdrawn(item: MaintenanceNotice, before: str, now: float) -> Finding:
    return Finding(
        id=f"maintenance:{item.node}:{item.source}:withdrawn:{item.at:.0f}",
        kind=FindingKind.MAINTENANCE,
        severity=Severity.INFO,
        at=now,
        since=min(item.at, now),
        summary=f"The maintenance of {item.node} was withdrawn.",
        node=item.node,
        evidence={"source": item.source, "withdraws": before},
        notice=Notice(item.source, "", now, None),
        recommended_actions=(Remedy.WATCH,),
    )
