"""Detects degradation before a failure: error counters that grow, throttled clocks, disks and memory that fill.

For each node and subject, every number is kept as a short series with `points` readings per window (`trends`). When a series
spans most of the window, three kinds of trend are judged:

* a rate (PCIe replays, symbol errors): the growth per second is over a published limit;
* a share of readings with new errors (NVLink, corrected ECC): one burst is normal, errors in half of all readings are not;
* a level that reaches its limit soon, by a straight line through the series (disk, memory).

All findings are warnings, with the trend as evidence.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar

import numpy as np

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.protocol import Findings, Observed
from holdfast.diagnostics.detectors.recurring import Recurring, Report
from holdfast.diagnostics.detectors.trends import Trends
from holdfast.diagnostics.roster import Roster
from holdfast.diagnostics.thresholds import DegradationThresholds
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.signals import GpuHealth, HostSample, NicSample

_SOURCES_MAX = 60_000  # (node, source) pairs
_COLUMNS_MAX = 512  # per pair; a usual node has about 40
_SPAN = 0.8  # share of the window that a series must cover
_PCIE_5 = 5
_NS = 1e-9


@dataclass(slots=True)
class _Source:
    """One kind of reading of one node."""

    subjects: Hashable  # of the columns; a change of the subjects starts new series
    trends: Trends
    reported: Recurring[_Condition] = field(default_factory=Recurring)


@dataclass(slots=True)
class DegradationState:
    sources: Bounded[tuple[str, type], _Source] = field(default_factory=lambda: Bounded(_SOURCES_MAX))


@dataclass(frozen=True, slots=True)
class _Condition:
    key: str
    what: str
    evidence: dict[str, str]
    gpu: int | None = None
    members: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Degradation:
    """Reports DEGRADATION."""

    reads: ClassVar = (GpuHealth, NicSample, HostSample)
    initial = DegradationState
    limits: DegradationThresholds = field(default_factory=DegradationThresholds)

    def observe(
        self, state: DegradationState, item: Observed, now: float, roster: Roster
    ) -> tuple[DegradationState, Findings]:
        columns: tuple[Sequence[float], ...]
        match item:
            case GpuHealth():
                columns = (
                    item.ecc_corrected,
                    item.nvlink_errors,
                    item.thermal_slowdown_ns,
                    item.power_brake_ns,
                    item.pcie_replays,
                )
                source = self._add(state, item, item.uuid, columns, counters=True)
                found = [] if source is None else list(self._gpus(source.trends, item))
            case NicSample():
                columns = (item.symbol_errors, item.link_recoveries, item.slow_restarts)
                source = self._add(state, item, (item.device, item.port), columns, counters=True)
                found = [] if source is None else list(self._ports(source.trends, item))
            case HostSample():
                paths = tuple(path for path, _, _ in item.disks)
                used = (item.memory_used, *(used for _, used, _ in item.disks))
                source = self._add(state, item, paths, (used,), counters=False)
                found = [] if source is None else list(self._host(source.trends, item))
            case _:
                return state, ()
        if source is None:
            return state, ()
        due = source.reported.due(found, int(item.at), now, int(self.limits.quiet_s), self.limits.repeat_s)
        return state, tuple(_finding(item.node, item.at, report, now) for report in due)

    def _add(
        self,
        state: DegradationState,
        item: GpuHealth | NicSample | HostSample,
        subjects: Hashable,
        columns: Sequence[Sequence[float]],
        *,
        counters: bool,
    ) -> _Source | None:
        """Add the reading. Returns the source, or None if the reading was not kept or the series is still too short."""
        reading = list(chain.from_iterable(columns))
        if not 0 < len(reading) <= _COLUMNS_MAX:
            return None
        key = (item.node, type(item))
        source = state.sources.get(key)
        if source is None or source.subjects != subjects:
            reported = Recurring() if source is None else source.reported
            source = state.sources[key] = _Source(subjects, self._empty(len(reading)), reported)
        changed = source.trends.add(item.at, reading, counters=counters)
        return source if changed and not source.trends.young else None

    def _empty(self, columns: int) -> Trends:
        limits = self.limits
        return Trends(
            columns=columns,
            points=limits.points + 1,
            every_s=limits.window_s / limits.points * 0.9,
            window_s=limits.window_s,
            span_s=_SPAN * limits.window_s,
        )

    # ---------------------------------------------------------------- sources

    def _gpus(self, trends: Trends, item: GpuHealth) -> Iterator[_Condition]:
        limits, count = self.limits, len(item.gpu)
        judged, rate = trends.judged, trends.rate
        lanes, generation = np.maximum(item.pcie_width, 1), np.asarray(item.pcie_gen)
        replays_max = limits.pcie_per_lane_s * lanes * np.where(generation >= _PCIE_5, 2, 1)
        share = trends.share_growing
        bad = np.empty((5, count), np.bool_)  # in the order of the columns
        bad[:2] = share.reshape(5, count)[:2] > limits.busy_share
        bad[2:4] = rate.reshape(5, count)[2:4] * _NS > limits.throttled_share
        bad[4] = rate.reshape(5, count)[4] > replays_max
        for column in np.nonzero(bad.ravel() & judged)[0].tolist():
            what, i = divmod(column, count)
            gpu, unit = item.gpu[i], f"gpu {item.uuid[i]}"
            if what < 2:
                name, words = _GPU_ERRORS[what]
                text = f"GPU {gpu} {words} in {share[column]:.0%} of the readings"
                yield _Condition(f"{unit} {name}", text, _trend(trends, column, name, "NVRx"), gpu)
            elif what < 4:
                name = _GPU_SLOWDOWNS[what - 2]
                text = f"GPU {gpu} is slowed down ({name}) {rate[column] * _NS:.0%} of the time"
                yield _Condition(f"{unit} {name}", text, _trend(trends, column, f"{name} slowdown, ns", "gpud"), gpu)
            else:
                allowed = f"{replays_max[i] * 60:.0f} are allowed"
                text = f"GPU {gpu} repeats {rate[column] * 60:.0f} PCIe transfers a minute ({allowed})"
                yield _Condition(f"{unit} PCIe replays", text, _trend(trends, column, "PCIe replays", "DCGM"), gpu)

    def _ports(self, trends: Trends, item: NicSample) -> Iterator[_Condition]:
        limits, count = self.limits, len(item.device)
        rate, allowed = trends.rate, (limits.symbol_errors_s, limits.link_recoveries_s, limits.slow_restarts_s)
        for column in np.nonzero((rate > np.repeat(allowed, count)) & trends.judged)[0].tolist():
            what, i = divmod(column, count)
            name, port = _PORT_COUNTERS[what], f"{item.device[i]} port {item.port[i]}"
            text = f"{port} counts {rate[column]:.2g} {name} a second ({allowed[what]:.2g} are too many)"
            yield _Condition(f"{port} {name}", text, _trend(trends, column, name, "NVSentinel"))

    def _host(self, trends: Trends, item: HostSample) -> Iterator[_Condition]:
        limits, judged = self.limits, trends.judged
        levels = [("memory", item.memory_used, item.memory_total, limits.memory_full_in_s)]
        levels += [(f"disk {path}", used, total, limits.disk_full_in_s) for path, used, total in item.disks]
        for column, (name, used, total, soon_s) in enumerate(levels):
            if total <= 0 or used < limits.full_from * total or not judged[column]:
                continue
            slope = trends.slope(column)
            if slope > 0 and (total - used) / slope < soon_s:
                left_s = (total - used) / slope
                what = f"its {name} fills by {slope * 3600 / 2**30:.2f} GiB an hour and is full in {left_s / 60:.0f} minutes"
                evidence = _trend(trends, column, f"{name}, bytes used", "ours") | {"full_in_s": f"{left_s:.0f}"}
                yield _Condition(name, what, evidence)


# In the order of the columns.
_GPU_ERRORS = (
    ("corrected memory errors", "corrects memory errors"),
    ("NVLink errors", "repeats transfers on NVLink"),
)
_GPU_SLOWDOWNS = ("thermal", "power brake")
_PORT_COUNTERS = ("symbol errors", "link recoveries", "slow restarts")


def _trend(trends: Trends, column: int, name: str, source: str) -> dict[str, str]:
    return {
        "counter": name,
        "first": f"{trends.first[column]:.0f}",
        "last": f"{trends.last[column]:.0f}",
        "over_s": f"{trends.span[column]:.0f}",
        "per_hour": f"{trends.rate[column] * 3600:.6g}",
        "rule_from": source,
    }


def _finding(node: str, at: float, report: Report[_Condition], now: float) -> Finding:
    condition, times = report.condition, report.times
    flapping = f" It comes and goes: {times} times so far." if times > 1 else ""
    return Finding(
        id=f"degradation:{node}:{condition.key}:{times}:{report.first}",
        kind=FindingKind.DEGRADATION,
        severity=Severity.WARNING,
        at=now,
        since=min(at - float(condition.evidence["over_s"]), now),
        summary=f"{node}: {condition.what}.{flapping}",
        node=node,
        gpu=condition.gpu,
        confidence=0.8,
        evidence=condition.evidence,
        recommended_actions=(Remedy.WATCH,),
        repeat=report.repeat,
    )
