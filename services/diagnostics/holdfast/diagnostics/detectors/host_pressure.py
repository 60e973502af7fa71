"""Detects host pressure: memory or a disk that is nearly full, a disk that is slow or cannot be written to, tasks that wait in
the kernel, a wrong clock, a collector that does not answer. All findings are warnings.

The limits have hysteresis: a reported condition ends when the value is below `clear`, so that values around the limit lead to
one finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from holdfast.diagnostics.detectors.lasting import Lasting
from holdfast.diagnostics.detectors.protocol import Findings, Observed
from holdfast.diagnostics.roster import Roster
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.signals import CollectorSilent, HostSample


@dataclass(slots=True)
class PressureState:
    pressed: Lasting[tuple[str, str]] = field(default_factory=Lasting)  # by node and resource


@dataclass(frozen=True, slots=True)
class HostPressure:
    reads: ClassVar = (HostSample, CollectorSilent)
    initial = PressureState
    warn: float = 0.95  # share in use
    clear: float = 0.90
    latency_s: float = 1.0  # one write of 4 KiB: a healthy disk under load needs tens of milliseconds
    blocked_per_cpu: float = 1.0  # tasks in state D per CPU
    clock_s: float = 0.1  # the clock skew that is tolerated when signals of several nodes are ordered
    clear_factor: float = 0.5  # share of the three limits above below which the condition has ended

    def observe(
        self, state: PressureState, item: Observed, now: float, roster: Roster
    ) -> tuple[PressureState, Findings]:
        match item:
            case HostSample():
                return state, self._sample(state, item, now)
            case CollectorSilent() if item.collector != "nvml":
                return state, (_silent(item, now),)
            case _:
                return state, ()

    def _sample(self, state: PressureState, item: HostSample, now: float) -> tuple[Finding, ...]:
        findings = list[Finding]()
        resources = [("memory", item.memory_used, item.memory_total)]
        resources += [(f"disk {path}", used, total) for path, used, total in item.disks]
        for resource, used, total in resources:
            share = used / total if total > 0 else 0.0
            key = (item.node, resource)
            if share < self.clear:
                findings += state.pressed.over(key, now)
            elif share > self.warn or key in state.pressed:
                findings += state.pressed.seen(key, now, partial(_pressed, item, resource, used, total, now))
        for resource, value, limit, words in self._measures(item):
            key = (item.node, resource)
            if value < limit * self.clear_factor:
                findings += state.pressed.over(key, now)
            elif value > limit or key in state.pressed:
                findings += state.pressed.seen(key, now, partial(_over, item, resource, value, limit, words, now))
        return tuple(findings)

    def _measures(self, item: HostSample) -> Iterator[tuple[str, float, float, str]]:
        """Yield (resource, value, limit, text). Values that the sample does not contain are not judged."""
        for path, seconds in item.disk_latency:
            late = "cannot be written to" if seconds == math.inf else f"needs {seconds:.1f} s for a small write"
            yield f"latency {path}", seconds, self.latency_s, f"{path} {late}"
        if item.blocked is not None:
            limit = self.blocked_per_cpu * max(1, item.cpus)
            yield "blocked", float(item.blocked), limit, f"{item.blocked} tasks wait in the kernel (state D)"
        if item.clock_offset_s is not None:
            words = f"its clock is {item.clock_offset_s:+.3f} s off"
            yield "clock", abs(item.clock_offset_s), self.clock_s, words
        if item.files_left is not None:
            words = f"the agent has no file descriptors left for new work (its limit is {item.files_max})"
            yield "descriptors", float(item.files_left == 0), 0.5, words


def _pressed(item: HostSample, resource: str, used: int, total: int, now: float) -> Finding:
    words = f"{item.node} has {used / total:.1%} of its {resource} in use ({(total - used) / 2**30:.2f} GiB left)."
    return _finding(item, resource, words, {"used_bytes": str(used), "total_bytes": str(total)}, now)


def _over(item: HostSample, resource: str, value: float, limit: float, words: str, now: float) -> Finding:
    evidence = {"value": f"{value:.3f}", "limit": f"{limit:.3f}"}
    return _finding(item, resource, f"On {item.node} {words}.", evidence, now)


def _finding(item: HostSample, resource: str, summary: str, evidence: dict[str, str], now: float) -> Finding:
    return Finding(
        id=f"pressure:{item.node}:{resource}:{item.at:.0f}",
        kind=FindingKind.HOST_PRESSURE,
        severity=Severity.WARNING,
        at=now,
        since=min(item.at, now),
        summary=summary,
        node=item.node,
        evidence={"resource": resource, **evidence},
        recommended_actions=(Remedy.WATCH,),
    )


def _silent(item: CollectorSilent, now: float) -> Finding:
    return Finding(
        id=f"silent:{item.node}:{item.collector}:{item.at - item.at % 300:.0f}",
        kind=FindingKind.HOST_PRESSURE,
        severity=Severity.WARNING,
        at=now,
        since=min(item.at, now),
        summary=f"The collector {item.collector} of {item.node} has not answered {item.misses} times in a row.",
        node=item.node,
        confidence=0.5,
        evidence={"collector": item.collector, "misses": str(item.misses), "reason": item.reason[:500]},
        recommended_actions=(Remedy.WATCH,),
    )
