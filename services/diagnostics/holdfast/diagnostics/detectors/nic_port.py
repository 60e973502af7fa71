"""Detects InfiniBand and RoCE ports that are down, flap or are missing, or count errors that healthy ports never have.

Only ports that were active before are judged, because an unused port is always down. All findings are warnings, repeated while
the state lasts. A job that needs the port fails by itself, and the failure is reported; the warning then explains it. Rates of
errors that healthy ports also have are judged by `degradation`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.lasting import Lasting
from holdfast.diagnostics.detectors.protocol import Findings, Observed
from holdfast.diagnostics.roster import Roster
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.signals import NicSample

_NODES_MAX = 50_000
_PORTS_MAX = 64  # of a node
_ACTIVE = "ACTIVE"
# NVSentinel's fatal counters: any growth is reported.
_FATAL = ("link_downed", "buffer_overruns", "integrity_errors", "rnr_retries")


@dataclass(slots=True)
class _Port:
    active: bool = False  # in the last sample
    down_since: float | None = None
    missed: int = 0  # samples in a row without this port
    downs: list[float] = field(default_factory=list)  # ends of the times for which it was down for `flap_s` or longer
    counters: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Node:
    ports: Bounded[str, _Port] = field(default_factory=lambda: Bounded(_PORTS_MAX))
    calm: NicSample | None = None  # the last sample, if every known port was active in it


@dataclass(slots=True)
class NicState:
    nodes: Bounded[str, _Node] = field(default_factory=lambda: Bounded(_NODES_MAX))
    lasting: Lasting[tuple[str, str, str]] = field(default_factory=Lasting)  # by node, port, rule


@dataclass(frozen=True, slots=True)
class NicPort:
    reads: ClassVar = (NicSample,)
    initial = NicState
    down_s: float = 240.0  # gpud: a port that is down for more than 4 min is a drop
    flap_s: float = 25.0  # gpud: a port that was down three times for 25 s or more flaps
    flaps: int = 3
    flap_window_s: float = 86_400.0
    missing: int = 3  # NVSentinel: a device missing over three polls
    quiet_s: float = 3600.0  # if a counter grows again within this time, the finding is the same

    def observe(self, state: NicState, item: Observed, now: float, roster: Roster) -> tuple[NicState, Findings]:
        if not isinstance(item, NicSample):
            return state, ()
        node = state.nodes.get_or_add(item.node, _Node)
        if node.calm is not None and _is_same(node.calm, item):
            return state, ()
        ports = node.ports
        findings, seen = list[Finding](), set[str]()
        for row, (device, number) in enumerate(zip(item.device, item.port, strict=True)):
            name = f"{device}/{number}"
            seen.add(name)
            findings += self._look(state, ports.get_or_add(name, _Port), item, row, name, now)
        for name in sorted(ports.keys() - seen):
            port = ports[name]
            port.missed += 1
            if port.active and port.missed >= self.missing:
                findings += state.lasting.seen(
                    (item.node, name, "missing"),
                    now,
                    partial(_finding, item, name, "missing", "is missing on the machine", {}, now),
                )
        all_active = len(ports) == len(seen) and all(word == _ACTIVE for word in item.state)
        node.calm = item if all_active else None
        return state, tuple(findings)

    def _look(
        self, state: NicState, port: _Port, item: NicSample, row: int, name: str, now: float
    ) -> Iterator[Finding]:
        if port.missed:
            yield from state.lasting.over((item.node, name, "missing"), now)
            port.missed = 0
        if item.state[row] == _ACTIVE:
            yield from self._up(state, port, item, name, now)
        elif port.active:
            port.down_since = item.at if port.down_since is None else min(port.down_since, item.at)
            down_s = item.at - port.down_since
            if down_s >= self.down_s:
                words = f"has been {item.state[row]} for {down_s:.0f} s"
                numbers = {"state": item.state[row], "phys_state": item.phys_state[row], "down_s": f"{down_s:.0f}"}
                finding = partial(_finding, item, name, "down", words, numbers, now)
                yield from state.lasting.seen((item.node, name, "down"), now, finding)
        for counter in _FATAL:
            value: int = getattr(item, counter)[row]
            before, port.counters[counter] = port.counters.get(counter, value), value
            if 0 <= before < value:  # a smaller value: the driver was loaded again
                numbers = {"counter": counter, "before": str(before), "now": str(value)}
                words = f"counts {value - before} more {counter.replace('_', ' ')}"
                finding = partial(_finding, item, name, counter, words, numbers, now)
                yield from state.lasting.seen((item.node, name, counter), now, finding, quiet_s=self.quiet_s)

    def _up(self, state: NicState, port: _Port, item: NicSample, name: str, now: float) -> Iterator[Finding]:
        since, port.down_since, port.active = port.down_since, None, True
        if since is None:
            return
        yield from state.lasting.over((item.node, name, "down"), now)
        if item.at - since < self.flap_s:
            return
        port.downs = [at for at in port.downs if item.at - at <= self.flap_window_s] + [item.at]
        if len(port.downs) == self.flaps:
            port.downs.clear()
            numbers = {"downs": str(self.flaps), "longer_than_s": f"{self.flap_s:.0f}"}
            yield _finding(item, name, "flap", f"went down and came up {self.flaps} times", numbers, now)


def _is_same(before: NicSample, item: NicSample) -> bool:
    """Whether the sample shows no change: the usual case, detected by comparing a few tuples."""
    if (before.device, before.port, before.state) != (item.device, item.port, item.state):
        return False
    return all(getattr(before, counter) == getattr(item, counter) for counter in _FATAL)


def _finding(item: NicSample, name: str, what: str, words: str, numbers: dict[str, str], now: float) -> Finding:
    return Finding(
        id=f"nic:{item.node}:{name}:{what}:{item.at:.0f}",
        kind=FindingKind.NETWORK_FAULT,
        severity=Severity.WARNING,
        at=now,
        since=min(item.at, now),
        summary=f"Network port {name} of {item.node} {words}.",
        node=item.node,
        confidence=0.9,
        evidence={"port": name, "rule": what, **numbers},
        recommended_actions=(Remedy.WATCH, Remedy.REBOOT_NODE, Remedy.REPLACE_NODE),
    )
