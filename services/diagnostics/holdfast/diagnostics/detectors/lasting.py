"""Reports a state when it begins, again every `REPEAT_S` while it holds, and when it ends. Pure.

Used for states that readings show, such as a port that is down; `recurring` is for conditions of steps. The supervisor asks the
policy about a warning that lasts, and drops a warning that is not repeated. A repeat has the id of the first report.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from holdfast.diagnostics.bounded import Bounded
from holdfast.domain.findings import Finding, Remedy, Severity

REPEAT_S = 600.0
_STATES_MAX = 100_000

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Known:
    finding: Finding  # as last reported
    seen_at: float  # when the state was last seen, diagnostics' clock, like `finding.at`


@dataclass(slots=True)
class Lasting(Generic[K]):
    """The states that hold, by key."""

    known: Bounded[K, _Known] = field(default_factory=lambda: Bounded(_STATES_MAX))

    def __contains__(self, key: K) -> bool:
        return key in self.known

    def seen(
        self, key: K, now: float, finding: Callable[[], Finding], *, quiet_s: float = math.inf
    ) -> Iterator[Finding]:
        """Record that the state holds, and yield its finding if a report is due. After more than `quiet_s` without a reading
        that showed it, the state counts as new."""
        known = self.known.get(key)
        if known is None or now - known.seen_at > quiet_s:
            self.known[key] = _Known(finding(), now)
            yield self.known[key].finding
            return
        known.seen_at = now
        if not 0.0 <= now - known.finding.at < REPEAT_S:
            first = known.finding
            known.finding = replace(finding(), id=first.id, since=first.since, repeat=first.repeat + 1)
            yield known.finding

    def over(self, key: K, now: float) -> Iterator[Finding]:
        """Record that the state has ended, and yield the withdrawal if the state was reported."""
        if (known := self.known.pop(key, None)) is not None:
            yield _withdrawal(known.finding, now)


def _withdrawal(finding: Finding, now: float) -> Finding:
    return Finding(
        id=f"{finding.id}:over",
        kind=finding.kind,
        severity=Severity.INFO,
        at=now,
        since=now,
        summary=f"Over: {finding.summary}",
        node=finding.node,
        gpu=finding.gpu,
        contradicts=finding.id,
        evidence={"contradicts": finding.id},
        recommended_actions=(Remedy.WATCH,),
    )
