"""The engine: one signal in, findings and finished steps out. Pure: no clock, no I/O, the same sequence gives the same answer.

It routes each item to the detectors that read its type, in their order, and feeds what they find back to those that read
findings, before the next detector sees the item. What leaves it is attributed (a finding about a node names the job that
runs there), correlated (a lost node or a broken GPU supersedes the crash that it caused), said once, and starts a trace. What
still holds is said again, seldom (`holding`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.diagnostics import steps
from holdfast.diagnostics.detectors.protocol import Blind, Detector, JobBegan, Observed
from holdfast.diagnostics.holding import Holding
from holdfast.domain import tracing
from holdfast.domain.findings import Finding, FindingKind, Severity, StepRecord
from holdfast.domain.signals import (
    ClockTick,
    GenerationStarted,
    GenerationStopped,
    RankProgress,
    Signal,
    StepColumns,
)

_FINDINGS_MAX = 10_000  # remembered, so that each is said once
_FAULTS_MAX = 64  # of one generation: its first failure is a root, a few corrections follow
_RESIDENTS_MAX = 50_000  # nodes
_JOBS_MAX = 4096
_WORKER_KINDS = frozenset({FindingKind.WORKER_CRASH, FindingKind.WORKER_EXCEPTION, FindingKind.REPEATED_EXCEPTION})


@dataclass(frozen=True, slots=True)
class Folded:
    """What one signal led to."""

    findings: tuple[Finding, ...] = ()
    steps: tuple[StepRecord, ...] = ()


_NOTHING = Folded()


@dataclass(slots=True)
class _Resident:
    """What runs on a node: generation by job."""

    jobs: dict[str, int] = field(default_factory=dict)
    stopped: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Life:
    """One submission of a job, as its generations show it."""

    generation: int
    submission: str
    stopped: bool = False  # that generation, on purpose

    def is_over(self, item: GenerationStarted) -> bool:
        """Does `item` belong to another submission under the same name? Told by its token, never by anybody's clock.

        An agent that does not say has at least an order: what starts at or below a number that was stopped starts again.
        """
        if item.submission and self.submission:
            return item.submission != self.submission
        return self.stopped and item.generation <= self.generation


class Engine:
    """Holds the state of all detectors. `blind_after_s`: a larger gap between clock ticks means that we were away."""

    def __init__(
        self, detectors: Sequence[Detector[Any]], *, blind_after_s: float = 1.0, correlate_s: float = 60.0
    ) -> None:
        self._detectors = tuple(detectors)
        self._states: list[Any] = [detector.initial() for detector in self._detectors]
        self._routes: dict[type, tuple[int, ...]] = {}
        self._steps = steps.StepState()
        self._said: OrderedDict[str, Finding] = OrderedDict()
        self._worker_faults: OrderedDict[tuple[str, int], deque[Finding]] = OrderedDict()
        self._residents: OrderedDict[str, _Resident] = OrderedDict()
        self._lives: OrderedDict[str, _Life] = OrderedDict()
        self._holding = Holding()
        self._blind_after_s = blind_after_s
        self._correlate_s = correlate_s
        self._clock: float | None = None

    def fold(self, signal: Signal, now: float) -> Folded:
        """Fold one signal at `now` (diagnostics' clock, Unix seconds)."""
        if self._clock is None:
            self._clock = now
        findings: list[Finding] = []
        records: tuple[StepRecord, ...] = ()
        repeats: tuple[Finding, ...] = ()
        match signal:
            case ClockTick():
                findings += self._passed(now)
                repeats = self._holding.due(now)
            case StepColumns():
                records = steps.fold(self._steps, signal)
            case GenerationStarted():
                findings += self._began(signal, now)
                steps.started(self._steps, signal)
                self._settle(signal)
            case RankProgress():
                self._settle(signal)
            case GenerationStopped():
                self._vacate(signal)
            case _:
                pass
        findings += self._observe(signal, now)
        for record in records:
            findings += self._observe(record, now)
            self._holding.stepped(record, now)
        if not (findings or records or repeats):
            return _NOTHING
        return Folded((*findings, *repeats), records)

    def _passed(self, now: float) -> list[Finding]:
        """Tell the detectors when time jumped: this process was stopped or starved, or its clock was set."""
        before, self._clock = self._clock, now
        if before is None or 0.0 <= now - before <= self._blind_after_s:
            return []
        return list(self._observe(Blind(at=now, gap_s=now - before), now))

    def blind(self, gap_s: float, now: float) -> Folded:
        """This process did not run for `gap_s`, whatever its clock says of that: it may have been set meanwhile."""
        return Folded(tuple(self._observe(Blind(at=now, gap_s=gap_s), now)))

    def _began(self, item: GenerationStarted, now: float) -> list[Finding]:
        """Follow each job's generations; a new submission under an old name makes everybody forget the old one."""
        life = self._lives.get(item.job)
        findings: list[Finding] = []
        if life is not None and life.is_over(item):
            steps.forget(self._steps, item.job)
            for resident in self._residents.values():
                resident.jobs.pop(item.job, None)
                resident.stopped.pop(item.job, None)
            self._holding.over(item.job)
            findings, life = list(self._observe(JobBegan(item.job), now)), None
        if life is None or item.generation > life.generation:
            self._holding.over(item.job, before=item.generation)
            self._lives[item.job] = _Life(item.generation, item.submission)
            self._lives.move_to_end(item.job)
            while len(self._lives) > _JOBS_MAX:
                self._lives.popitem(last=False)
        return findings

    def _observe(self, item: Observed, now: float) -> Iterator[Finding]:
        for index in self._route(type(item)):
            self._states[index], found = self._detectors[index].observe(self._states[index], item, now)
            for finding in found:
                told = self._tell(finding)
                if told is not None:
                    yield told
                    yield from self._observe(told, now)

    def _route(self, kind: type) -> tuple[int, ...]:
        route = self._routes.get(kind)
        if route is None:
            route = tuple(i for i, detector in enumerate(self._detectors) if kind in detector.reads)
            self._routes[kind] = route
        return route

    def _tell(self, finding: Finding) -> Finding | None:
        """The finding as it leaves; None when it has been said before."""
        said = self._said.get(finding.id)
        if said is not None and 0.0 <= finding.at - said.at <= finding.ttl_s:
            return None
        finding = self._correlate(self._attribute(finding))
        finding = _traced(finding)
        self._said[finding.id] = finding
        self._said.move_to_end(finding.id)
        while len(self._said) > _FINDINGS_MAX:
            self._said.popitem(last=False)
        if finding.kind in _WORKER_KINDS:
            self._remember(finding)
        self._holding.said(finding)
        return finding

    def _attribute(self, finding: Finding) -> Finding:
        """A fault of a node is a fault of the job that runs there, when there is exactly one."""
        resident = self._residents.get(finding.node)
        if finding.job or resident is None or len(resident.jobs) != 1:
            return finding
        ((job, generation),) = resident.jobs.items()
        return replace(finding, job=job, generation=generation)

    def _correlate(self, finding: Finding) -> Finding:
        """A lost node or a fatal GPU error is the root of the worker's failure that was reported a moment before it."""
        root = (finding.kind is FindingKind.NODE_LOST and finding.severity is Severity.ERROR) or (
            finding.kind is FindingKind.GPU_ERROR and finding.severity is Severity.FATAL
        )
        if not root or not finding.job or "supersedes" in finding.evidence:
            return finding
        for earlier in reversed(self._worker_faults.get((finding.job, finding.generation), ())):
            if finding.at - earlier.at > self._correlate_s:
                break
            if earlier.node == finding.node or earlier.confidence < 0.5:
                return replace(finding, evidence={**finding.evidence, "supersedes": earlier.id})
        return finding

    def _remember(self, finding: Finding) -> None:
        """By generation, because in a storm of thousands of faults each of them is looked up by each lost node."""
        key = (finding.job, finding.generation)
        faults = self._worker_faults.get(key)
        if faults is None:
            faults = self._worker_faults[key] = deque(maxlen=_FAULTS_MAX)
            while len(self._worker_faults) > _FINDINGS_MAX:
                self._worker_faults.popitem(last=False)
        faults.append(finding)

    def _settle(self, item: GenerationStarted | RankProgress) -> None:
        resident = self._residents.get(item.node)
        if resident is None:
            resident = self._residents[item.node] = _Resident()
            while len(self._residents) > _RESIDENTS_MAX:
                self._residents.popitem(last=False)
        if resident.stopped.get(item.job, -1) < item.generation:
            resident.jobs[item.job] = item.generation

    def _vacate(self, item: GenerationStopped) -> None:
        if not item.finished:
            self._holding.over(item.job, before=item.generation + 1)
        life = self._lives.get(item.job)
        if life is not None and life.generation == item.generation:
            life.stopped = True
        resident = self._residents.get(item.node)
        if resident is None:
            return
        resident.stopped[item.job] = max(item.generation, resident.stopped.get(item.job, -1))
        if resident.jobs.get(item.job, item.generation + 1) <= item.generation:
            del resident.jobs[item.job]


def _traced(finding: Finding) -> Finding:
    """With its own place in a trace: that of the signal which a detector named, or a new one. Derived from its id, so that the
    same fault found again is the same trace."""
    signal = tracing.parse(finding.traceparent)
    if signal is None:
        return replace(finding, traceparent=tracing.new_trace(f"{finding.id}@{finding.since:.0f}").traceparent)
    evidence = {**finding.evidence, tracing.SIGNAL: finding.traceparent}
    return replace(finding, traceparent=signal.child(tracing.FINDING, finding.id).traceparent, evidence=evidence)
