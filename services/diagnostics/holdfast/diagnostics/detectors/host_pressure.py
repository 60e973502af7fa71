"""Host pressure: memory or a disk close to full, a collector that does not answer. Warnings, never a reason to evict.

With hysteresis: a resource that was reported is news again only after it has fallen below `clear`, so that one which swings
around the limit does not repeat itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.diagnostics.detectors.protocol import Observed
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.signals import CollectorSilent, HostSample

_PRESSED_MAX = 100_000  # (node, resource) pairs remembered


@dataclass(slots=True)
class PressureState:
    pressed: dict[tuple[str, str], float] = field(default_factory=dict)  # (node, resource) → since, agent's clock


@dataclass(frozen=True, slots=True)
class HostPressure:
    warn: float = 0.95  # share in use
    clear: float = 0.90

    @property
    def reads(self) -> tuple[type[Observed], ...]:
        return (HostSample, CollectorSilent)

    def initial(self) -> PressureState:
        return PressureState()

    def observe(self, state: PressureState, item: Observed, now: float) -> tuple[PressureState, tuple[Finding, ...]]:
        match item:
            case HostSample():
                return state, self._sample(state, item, now)
            case CollectorSilent() if item.collector != "nvml":
                return state, (_silent(item, now),)
            case _:
                return state, ()

    def _sample(self, state: PressureState, item: HostSample, now: float) -> tuple[Finding, ...]:
        findings = []
        resources = [("memory", item.memory_used, item.memory_total)]
        resources += [(f"disk {path}", used, total) for path, used, total in item.disks]
        for resource, used, total in resources:
            share = used / total if total > 0 else 0.0
            key = (item.node, resource)
            if share < self.clear:
                state.pressed.pop(key, None)
            elif share > self.warn and key not in state.pressed and len(state.pressed) < _PRESSED_MAX:
                state.pressed[key] = item.at
                findings.append(_pressed(item, resource, used, total, now))
        return tuple(findings)


def _pressed(item: HostSample, resource: str, used: int, total: int, now: float) -> Finding:
    return Finding(
        id=f"pressure:{item.node}:{resource}:{item.at:.0f}",
        kind=FindingKind.HOST_PRESSURE,
        severity=Severity.WARNING,
        at=now,
        since=min(item.at, now),
        summary=f"{item.node} has {used / total:.1%} of its {resource} in use ({(total - used) / 2**30:.2f} GiB left).",
        node=item.node,
        evidence={"resource": resource, "used_bytes": str(used), "total_bytes": str(total)},
        ladder=(Remedy.WATCH,),
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
        ladder=(Remedy.WATCH,),
    )
