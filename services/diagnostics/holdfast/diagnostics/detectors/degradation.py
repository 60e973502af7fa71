"""Degradation: what gets worse before it breaks. Counters of errors that grow, clocks held down, disks and memory that fill.

Every number is kept as a short series, thinned to `points` per window, per node and subject. A counter that falls was reset by
its driver: its series starts again. Three kinds of trend are judged once a series spans most of the window:

* a rate (PCIe replays, symbol errors): the growth per second is over a limit that a source names;
* a share of readings with new errors (NVLink, corrected ECC): one burst is weather, errors in half of all readings are not;
* a level that reaches its end soon, by a straight line through the series (disk, memory).

All are warnings that carry the trend. Nothing is evicted: what really breaks is found by what it breaks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from holdfast.diagnostics.detectors.protocol import Observed
from holdfast.diagnostics.detectors.recurring import Recurring
from holdfast.diagnostics.thresholds import DegradationThresholds
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.signals import GpuHealth, HostSample, NicSample

_NODES_MAX = 20_000
_SERIES_MAX = 512  # per node
_SPAN = 0.8  # share of the window that a series must cover
_PCIE_5 = 5

_NS = 1e-9

Series = deque[tuple[float, float]]  # (agent's clock, value)


@dataclass(slots=True)
class _Node:
    series: OrderedDict[str, Series] = field(default_factory=OrderedDict)
    said: dict[str, Recurring] = field(default_factory=dict)  # by source


@dataclass(slots=True)
class DegradationState:
    nodes: OrderedDict[str, _Node] = field(default_factory=OrderedDict)


@dataclass(frozen=True, slots=True)
class _Condition:
    key: str
    what: str
    evidence: dict[str, str]
    gpu: int | None = None
    members: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Degradation:
    """DEGRADATION."""

    limits: DegradationThresholds = field(default_factory=DegradationThresholds)

    @property
    def reads(self) -> tuple[type[Observed], ...]:
        return (GpuHealth, NicSample, HostSample)

    def initial(self) -> DegradationState:
        return DegradationState()

    def observe(
        self, state: DegradationState, item: Observed, now: float
    ) -> tuple[DegradationState, tuple[Finding, ...]]:
        match item:
            case GpuHealth():
                node = _node(state, item.node)
                found, source = list(self._gpus(node, item)), "gpu"
            case NicSample():
                node = _node(state, item.node)
                found, source = list(self._ports(node, item)), "nic"
            case HostSample():
                node = _node(state, item.node)
                found, source = list(self._host(node, item)), "host"
            case _:
                return state, ()
        said = node.said.setdefault(source, Recurring())
        news = said.news(found, int(item.at), now, int(self.limits.quiet_s), self.limits.repeat_s)
        return state, tuple(_finding(item.node, item.at, condition, times, now) for condition, times in news)

    # ---------------------------------------------------------------- sources

    def _gpus(self, node: _Node, item: GpuHealth) -> Iterator[_Condition]:
        limits = self.limits
        for i, gpu in enumerate(item.gpu):
            unit = f"gpu {item.uuid[i]}"
            for name, value, words in (
                ("corrected memory errors", item.ecc_corrected[i], "corrects memory errors"),
                ("NVLink errors", item.nvlink_errors[i], "repeats transfers on NVLink"),
            ):
                series = self._grow(node, f"{unit} {name}", item.at, value)
                share = _share_growing(series) if self._spans(series) else 0.0
                if share > limits.busy_share:
                    what = f"GPU {gpu} {words} in {share:.0%} of the readings"
                    yield _Condition(f"{unit} {name}", what, _trend(series, name, "NVRx"), gpu)
            for name, value in (("thermal", item.thermal_slowdown_ns[i]), ("power brake", item.power_brake_ns[i])):
                series = self._grow(node, f"{unit} {name}", item.at, value)
                share = _rate(series) * _NS if self._spans(series) else 0.0
                if share > limits.throttled_share:
                    what = f"GPU {gpu} is slowed down ({name}) {share:.0%} of the time"
                    yield _Condition(f"{unit} {name}", what, _trend(series, f"{name} slowdown, ns", "gpud"), gpu)
            series = self._grow(node, f"{unit} PCIe replays", item.at, item.pcie_replays[i])
            limit = limits.pcie_per_lane_s * max(1, item.pcie_width[i]) * (2 if item.pcie_gen[i] >= _PCIE_5 else 1)
            if self._spans(series) and _rate(series) > limit:
                what = (
                    f"GPU {gpu} repeats {_rate(series) * 60:.0f} PCIe transfers a minute ({limit * 60:.0f} are allowed)"
                )
                yield _Condition(f"{unit} PCIe replays", what, _trend(series, "PCIe replays", "DCGM"), gpu)

    def _ports(self, node: _Node, item: NicSample) -> Iterator[_Condition]:
        limits = self.limits
        for i, device in enumerate(item.device):
            port = f"{device} port {item.port[i]}"
            for name, value, limit in (
                ("symbol errors", item.symbol_errors[i], limits.symbol_errors_s),
                ("link recoveries", item.link_recoveries[i], limits.link_recoveries_s),
                ("slow restarts", item.slow_restarts[i], limits.slow_restarts_s),
            ):
                series = self._grow(node, f"{port} {name}", item.at, value)
                if self._spans(series) and _rate(series) > limit:
                    what = f"{port} counts {_rate(series):.2g} {name} a second ({limit:.2g} are too many)"
                    yield _Condition(f"{port} {name}", what, _trend(series, name, "NVSentinel"))

    def _host(self, node: _Node, item: HostSample) -> Iterator[_Condition]:
        limits = self.limits
        levels = [("memory", item.memory_used, item.memory_total, limits.memory_full_in_s)]
        levels += [(f"disk {path}", used, total, limits.disk_full_in_s) for path, used, total in item.disks]
        for name, used, total, soon_s in levels:
            series = self._keep(node, name, item.at, used)
            if total <= 0 or used < limits.full_from * total or not self._spans(series):
                continue
            slope = _slope(series)
            if slope > 0 and (total - used) / slope < soon_s:
                left_s = (total - used) / slope
                what = f"its {name} fills by {slope * 3600 / 2**30:.2f} GiB an hour and is full in {left_s / 60:.0f} minutes"
                yield _Condition(
                    name, what, _trend(series, f"{name}, bytes used", "ours") | {"full_in_s": f"{left_s:.0f}"}
                )

    # ---------------------------------------------------------------- series

    def _grow(self, node: _Node, name: str, at: float, value: int) -> Series:
        """Add a reading of a counter. Not known (-1) adds nothing; a counter that falls starts again."""
        series = node.series.get(name)
        if value < 0:
            return series if series is not None else deque()
        if series and value < series[-1][1]:
            series.clear()
        return self._keep(node, name, at, value)

    def _keep(self, node: _Node, name: str, at: float, value: float) -> Series:
        limits = self.limits
        series = node.series.get(name)
        if series is None:
            series = node.series[name] = deque(maxlen=limits.points + 1)
            while len(node.series) > _SERIES_MAX:
                node.series.popitem(last=False)
        if series and at < series[-1][0]:
            series.clear()  # the clock was set back
        if series and at - series[-1][0] > limits.window_s:
            series.clear()  # nobody looked for so long that the rate in between says nothing
        if not series or at - series[-1][0] >= limits.window_s / limits.points * 0.9:
            series.append((at, float(value)))
        return series

    def _spans(self, series: Series) -> bool:
        return len(series) > 2 and series[-1][0] - series[0][0] >= _SPAN * self.limits.window_s


def _rate(series: Series) -> float:
    """Growth per second from the first reading to the last."""
    return (series[-1][1] - series[0][1]) / (series[-1][0] - series[0][0])


def _share_growing(series: Series) -> float:
    values = [value for _, value in series]
    return sum(after > before for before, after in pairwise(values)) / (len(values) - 1)


def _slope(series: Series) -> float:
    """Per second, by least squares: one file that is written and removed is no trend."""
    points = np.asarray(series, np.float64)
    times = points[:, 0] - points[:, 0].mean()
    return float((times * (points[:, 1] - points[:, 1].mean())).sum() / np.square(times).sum())


def _trend(series: Series, name: str, source: str) -> dict[str, str]:
    return {
        "counter": name,
        "first": f"{series[0][1]:.0f}",
        "last": f"{series[-1][1]:.0f}",
        "over_s": f"{series[-1][0] - series[0][0]:.0f}",
        "per_hour": f"{_rate(series) * 3600:.6g}",
        "rule_from": source,
    }


def _node(state: DegradationState, name: str) -> _Node:
    node = state.nodes.get(name)
    if node is None:
        node = state.nodes[name] = _Node()
        while len(state.nodes) > _NODES_MAX:
            state.nodes.popitem(last=False)
    return node


def _finding(node: str, at: float, condition: _Condition, times: int, now: float) -> Finding:
    flapping = f" It comes and goes: {times} times so far." if times > 1 else ""
    return Finding(
        id=f"degradation:{node}:{condition.key}:{times}:{at:.0f}",
        kind=FindingKind.DEGRADATION,
        severity=Severity.WARNING,
        at=now,
        since=min(at - float(condition.evidence["over_s"]), now),
        summary=f"{node}: {condition.what}.{flapping}",
        node=node,
        gpu=condition.gpu,
        confidence=0.8,
        evidence=condition.evidence,
        ladder=(Remedy.WATCH,),
    )
