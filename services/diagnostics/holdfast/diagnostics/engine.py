"""Engine of diagnostics: folds one signal and returns findings and finished steps. Pure: no clock and no I/O. The same sequence
of signals gives the same result.

The engine folds each item into the roster and then passes it to the detectors that read its type, in their order. If a detector
reports a finding, the detectors that read findings receive the finding before the next detector receives the item. The engine
adds to each finding

* the job that runs on the node, if the detector has named only the node;
* `supersedes`: the finding about a lost node or a broken GPU replaces the finding about the worker failure that it caused;
* a trace context (`traceparent`).

The engine returns each finding once. While a finding holds, the engine repeats it at growing intervals (`holding`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from holdfast.diagnostics import steps
from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.protocol import Detector, Findings, Observed, TelemetryGap
from holdfast.diagnostics.holding import Holding
from holdfast.diagnostics.roster import Roster, RunStarted
from holdfast.domain import tracing
from holdfast.domain.findings import Finding, FindingKind, Severity, StepRecord
from holdfast.domain.signals import (
    ClockTick,
    GenerationStarted,
    GenerationStopped,
    NodeBeat,
    RankProgress,
    Signal,
    StepColumns,
    WorkerExited,
)

_FINDINGS_MAX = 10_000  # ids of reported findings that are kept, so that each finding is reported once
_CORRELATE_S = 60.0  # a worker failure that was reported longer ago is not superseded
_FAULTS_MAX = 64  # worker failures kept per generation: the root failure and a few corrections
_WORKER_KINDS = frozenset({FindingKind.WORKER_CRASH, FindingKind.WORKER_EXCEPTION, FindingKind.REPEATED_EXCEPTION})


@dataclass(frozen=True, slots=True)
class Folded:
    """The findings and finished steps that follow from one signal."""

    findings: tuple[Finding, ...] = ()
    steps: tuple[StepRecord, ...] = ()


_NOTHING = Folded()
# The detectors that read a type: the place of the detector's state, and its `observe`.
_Route = tuple[tuple[int, Callable[[Any, Observed, float, Roster], tuple[Any, Findings]]], ...]


class Engine:
    """Keeps the state of all detectors.

    `gap_after_s`: a longer time between two clock ticks is a gap in the telemetry."""

    def __init__(self, detectors: Sequence[Detector[Any]], *, gap_after_s: float = 1.0) -> None:
        self._detectors = tuple(detectors)
        self._states: list[Any] = [detector.initial() for detector in self._detectors]
        self._routes: dict[type, _Route] = {}
        self._roster = Roster()
        self._steps = steps.StepState()
        self._reported: Bounded[str, Finding] = Bounded(_FINDINGS_MAX)
        self._worker_faults: Bounded[tuple[str, int], deque[Finding]] = Bounded(_FINDINGS_MAX)
        self._holding = Holding()
        self._gap_after_s = gap_after_s
        self._clock: float | None = None

    def fold(self, signal: Signal, now: float) -> Folded:
        """Fold one signal at `now` (diagnostics' clock, Unix seconds)."""
        if self._clock is None:
            self._clock = now
        findings: list[Finding] = []
        records: tuple[StepRecord, ...] = ()
        repeats: tuple[Finding, ...] = ()
        match signal:
            case NodeBeat():
                pass
            case RankProgress() | StepColumns() | GenerationStarted() | GenerationStopped() | WorkerExited() if (
                self._roster.is_of_earlier_run(signal)
            ):
                return _NOTHING
            case RankProgress():
                self._roster.observe(signal)
            case WorkerExited():
                findings += self._begun(signal, now)
                self._roster.observe(signal)
            case StepColumns():
                records = steps.fold(self._steps, signal)
            case ClockTick():
                findings += self._passed(now)
                repeats = self._holding.due(now)
            case GenerationStarted():
                findings += self._started(signal, now)
            case GenerationStopped():
                if not signal.finished:
                    self._holding.over(signal.job, before=signal.generation + 1)
                self._roster.observe(signal)
            case _:
                pass
        self._observe(signal, now, findings)
        for record in records:
            self._observe(record, now, findings)
            self._holding.stepped(record, now)
        if not (findings or records or repeats):
            return _NOTHING
        return Folded((*findings, *repeats), records)

    def gap(self, gap_s: float, now: float) -> Folded:
        """Report to the detectors that this process did not run for `gap_s`. The wall clock may show a shorter gap, because it
        may have been set in the meantime."""
        return Folded(tuple(self._observe(TelemetryGap(at=now, gap_s=gap_s), now, [])))

    def _passed(self, now: float) -> list[Finding]:
        """Report a jump of the clock to the detectors: this process was stopped or got no CPU time, or its clock was set."""
        before, self._clock = self._clock, now
        if before is None or 0.0 <= now - before <= self._gap_after_s:
            return []
        return self._observe(TelemetryGap(at=now, gap_s=now - before), now, [])

    def _started(self, item: GenerationStarted, now: float) -> list[Finding]:
        """Record the start of a generation."""
        findings = self._begun(item, now)
        if item.generation > self._roster.newest_started(item.job):
            self._holding.over(item.job, before=item.generation)
        self._roster.observe(item)
        steps.started(self._steps, item)
        return findings

    def _begun(self, item: GenerationStarted | WorkerExited, now: float) -> list[Finding]:
        """If a new run begins with the item, drop all data of the job's earlier run."""
        findings: list[Finding] = []
        if self._roster.is_new_run(item):
            began = RunStarted(item.job, item.node)
            self._roster.observe(began)
            steps.forget(self._steps, item.job)
            self._holding.over(item.job)
            self._observe(began, now, findings)
        return findings

    def _observe(self, item: Observed, now: float, findings: list[Finding]) -> list[Finding]:
        """Pass an item to the detectors that read its type. Appends what they report to `findings`, and returns that list."""
        states, roster = self._states, self._roster
        for index, observe in self._routes.get(type(item)) or self._route(type(item)):
            states[index], found = observe(states[index], item, now, roster)
            for finding in found:
                report = self._report(finding)
                if report is not None:
                    findings.append(report)
                    self._observe(report, now, findings)
        return findings

    def _route(self, kind: type) -> _Route:
        self._routes[kind] = route = tuple(
            (index, detector.observe) for index, detector in enumerate(self._detectors) if kind in detector.reads
        )
        return route

    def _report(self, finding: Finding) -> Finding | None:
        """Return the finding to publish; None if the same finding has been reported before."""
        earlier = self._reported.get(finding.id)
        if earlier is not None and 0.0 <= finding.at - earlier.at <= finding.ttl_s:
            return None
        finding = self._correlate(self._attribute(finding))
        finding = _traced(finding)
        self._reported[finding.id] = finding
        if finding.kind in _WORKER_KINDS:
            # Grouped by generation, so that each of thousands of lost nodes searches only the failures of its generation.
            key = (finding.job, finding.generation)
            self._worker_faults.get_or_add(key, lambda: deque(maxlen=_FAULTS_MAX)).append(finding)
        self._holding.reported(finding)
        return finding

    def _attribute(self, finding: Finding) -> Finding:
        """Add the job to a finding about a node, if exactly one job runs on that node."""
        running = self._roster.on(finding.node)
        if finding.job or len(running) != 1:
            return finding
        ((job, placement),) = running.items()
        return replace(finding, job=job, generation=placement.generation)

    def _correlate(self, finding: Finding) -> Finding:
        """Let a lost node or a fatal GPU error supersede the worker failure that was reported shortly before."""
        root = (finding.kind is FindingKind.NODE_LOST and finding.severity is Severity.ERROR) or (
            finding.kind is FindingKind.GPU_ERROR and finding.severity is Severity.FATAL
        )
        if not root or not finding.job or finding.supersedes:
            return finding
        for earlier in reversed(self._worker_faults.get((finding.job, finding.generation), ())):
            if finding.at - earlier.at > _CORRELATE_S:
                break
            if earlier.node == finding.node or earlier.confidence < 0.5:
                return replace(finding, supersedes=earlier.id, evidence={**finding.evidence, "supersedes": earlier.id})
        return finding


def _traced(finding: Finding) -> Finding:
    """Add a trace context: a child of the signal that the detector named, or the root of a new trace.

    Both are derived from the finding's id, so that a second finding about the same fault belongs to the same trace."""
    signal = tracing.parse(finding.traceparent)
    if signal is None:
        return replace(finding, traceparent=tracing.new_trace(f"{finding.id}@{finding.since:.0f}").traceparent)
    evidence = {**finding.evidence, tracing.SIGNAL: finding.traceparent}
    return replace(finding, traceparent=signal.child(tracing.FINDING, finding.id).traceparent, evidence=evidence)
