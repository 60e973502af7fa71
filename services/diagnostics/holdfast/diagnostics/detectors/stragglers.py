"""Detects stragglers, which are ranks that are slower than the others step after step, and other reasons for long steps.

Theory of operation, per (job, generation). In synchronous training the steps of all ranks take equally long. A rank's *own
work* in a step is therefore the duration of the step minus the time for which the rank waited for other ranks (`comm_wait_s`).
If that wait is not measured, only the time for which a rank waited for its data can be distinguished. Own work is then this
time plus the shortest remainder of any rank. If a script reports no steps, blocks of optimizer steps that were observed in its
processes (`ObservedSteps`) are compared, as if the mean of a block were a step.

When every rank has finished a step, the step is arranged by pipeline stage and compared (`comparison`). A window of steps shows

* a rank that is slower than the others whatever its data: STRAGGLER, with the excess, its first step, and the gain of the job
  without the rank's node; slow data loading is distinguished from slow work;
* ranks whose data explains why they are slow, or a stage that is longer than the others: IMBALANCE, which names no rank;
* a wait that has grown even on the rank that waits least: SLOW_COLLECTIVE, the network.

If a stage has only one rank, ranks are compared with their own past, and with the change of the other ranks' work.

All conditions are warnings, and the job continues. A condition that ends and returns within `quiet_steps` is flapping, which is
reported once. If a condition ends otherwise, its report is withdrawn, so that no planned change is made because of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from holdfast.diagnostics import steps
from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors import comparison
from holdfast.diagnostics.detectors.comparison import Floats, Grid
from holdfast.diagnostics.detectors.protocol import Findings, Observed
from holdfast.diagnostics.detectors.recurring import Recurring
from holdfast.diagnostics.detectors.slow_steps import Condition, Judged, Window, conditions
from holdfast.diagnostics.detectors.step_reports import Reports, StepReports
from holdfast.diagnostics.roster import Generation, Roster, RunStarted
from holdfast.diagnostics.thresholds import StragglerThresholds
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity, StepRecord
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import GenerationStarted, ObservedSteps, StepColumns

_RANKS_MAX = 1_000_000  # of all jobs; beyond it, the job whose generation began first is no longer compared
REPEAT_S_MIN = 1.0
TTL_S = 300.0
SETTLED = 1.02  # multiple of the time that a condition must last; a repeat after it shows that the condition has lasted
_WARM_UP = 3  # first steps of a generation, which compile and allocate


@dataclass(slots=True)
class _Run:
    """The newest generation of a job."""

    generation: Generation
    mesh_ranks: int
    window: Window
    reports: StepReports
    raw: Floats  # ring buffer of the window: excess within ±clip, steps × stages × comparison group
    cause: Floats  # ring buffer of the covariate of `raw`, within ±clip
    total: Floats  # sum of `raw` over the window, updated with each step
    alone: bool  # each stage has one rank, which is compared with its past
    repeat_s: float  # time after which a condition that lasts is reported again
    finished: int = 0  # number of steps
    judged: int = 0
    past: list[Floats] = field(default_factory=list)  # work of the first steps, until `usual` is known
    usual: Floats | None = None
    reported: Recurring[Condition] = field(default_factory=Recurring)
    observed: steps.StepState | None = None  # of a script that reports no steps


@dataclass(slots=True)
class StragglerState:
    runs: Bounded[str, _Run] = field(default_factory=lambda: Bounded(_RANKS_MAX, weigh=lambda run: run.mesh_ranks))

    def of(self, item: StepColumns | ObservedSteps | StepRecord) -> _Run | None:
        """The run of the job, if `item` is about the generation that is compared."""
        run = self.runs.get(item.job)
        return run if run is not None and run.generation.number == item.generation else None


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Reports STRAGGLER, IMBALANCE and SLOW_COLLECTIVE."""

    reads: ClassVar = (StepColumns, ObservedSteps, StepRecord, GenerationStarted, RunStarted)
    initial = StragglerState
    limits: StragglerThresholds = field(default_factory=StragglerThresholds)

    def observe(
        self, state: StragglerState, item: Observed, now: float, roster: Roster
    ) -> tuple[StragglerState, Findings]:
        match item:
            case StepColumns():
                run = state.of(item)
                if run is not None:
                    run.reports.collect(item)
            case ObservedSteps():
                run = state.of(item)
                if run is not None:
                    return state, self._observed(run, item, now)
            case StepRecord():
                run = state.of(item)
                if run is not None:
                    return state, self._finished(run, item, now)
            case GenerationStarted():
                self._open(state, item, roster.current(item.job, item.generation))
            case RunStarted():
                state.runs.pop(item.job, None)
            case _:
                pass
        return state, ()

    def _open(self, state: StragglerState, item: GenerationStarted, generation: Generation | None) -> None:
        """Begin to compare the ranks of a new generation. Each node reports its start; the first report is enough."""
        if generation is None or generation.mesh is None:
            return
        run = state.runs.get(generation.job)
        if run is None or run.generation is not generation:
            state.runs[generation.job] = _new_run(generation, generation.mesh, self._limits_of(item))

    def _limits_of(self, item: GenerationStarted) -> StragglerThresholds:
        """The thresholds of a job: a condition that lasts is reported again when the policy may be asked, if that is sooner."""
        if not item.warning_settles_s:
            return self.limits
        repeat_s = max(REPEAT_S_MIN, SETTLED * item.warning_settles_s)
        return replace(self.limits, repeat_s=min(self.limits.repeat_s, repeat_s))

    def _observed(self, run: _Run, item: ObservedSteps, now: float) -> tuple[Finding, ...]:
        """Fold one node's blocks of steps, and judge the blocks that every rank has finished."""
        if run.observed is None:
            run.observed = steps.StepState()
            steps.follow(run.observed, (item.job, item.generation), run.mesh_ranks)
        columns = _mean_steps(item)
        run.reports.collect(columns)
        found: list[Finding] = []
        for record in steps.fold(run.observed, columns):
            found += self._finished(run, record, now)
        return tuple(found)

    def _finished(self, run: _Run, record: StepRecord, now: float) -> tuple[Finding, ...]:
        run.finished += 1
        reports = run.reports.close(record.step)
        judged = self._judge(run, record.step, reports) if run.finished > _WARM_UP else None
        if judged is None:
            return ()
        run.window.steps.append(judged)
        run.judged += 1
        if len(run.window.steps) < self.limits.window_min:
            return ()
        found = list(self._conclude(run))
        due = run.reported.due(found, record.step, now, self.limits.quiet_steps, run.repeat_s)
        findings = [_finding(record, report.condition, report.times, now, run.repeat_s) for report in due]
        over = run.reported.over(record.step, self.limits.over_steps)
        findings += [_over(record, condition, times, now) for condition, times in over]
        return tuple(findings)

    def _judge(self, run: _Run, step: int, reports: Reports) -> Judged | None:
        """Compute each rank's work in the step and its excess over its group; None if the step cannot be compared."""
        if not reports.fill(self.limits.missing):
            return None
        last_wait_s = float(reports.wait_s.min())  # NaN if any wait is NaN
        measured = not math.isnan(last_wait_s)
        if measured:
            own = np.maximum(reports.duration_s - reports.wait_s, reports.data_s)
        else:
            own = (reports.duration_s - reports.data_s).min() + reports.data_s
        if not own.min() > 0:
            return None  # a clock was set back
        grid, work = run.window.grid, run.window.grid.lay(own)
        over, stage_s = comparison.excess(work)
        if run.alone:
            compared = _against_past(run, work, self.limits.window)
            if compared is None:
                return None
            over, cause = compared, np.zeros_like(compared)
        else:
            effect = comparison.data_effect(over, grid)
            cause = _token_excess(reports.tokens, grid) if effect is None else effect
        return Judged(
            step=step,
            work=work,
            over=over,
            data=grid.lay(reports.data_s).copy(),  # a view would keep all columns in memory
            stage_s=stage_s,
            worst=self._remember(run, over, cause),
            duration_s=float(np.median(reports.duration_s[:: max(1, run.mesh_ranks // comparison.SAMPLE)])),
            last_wait_s=last_wait_s,
        )

    def _remember(self, run: _Run, over: Floats, cause: Floats) -> Floats:
        """Replace the oldest step of the ring. Returns the largest excess of each stage."""
        slot, clip = run.judged % self.limits.window, self.limits.clip
        ring = run.raw[slot]
        np.subtract(run.total, ring, out=run.total)
        np.clip(over, -clip, clip, out=ring)
        np.clip(cause, -clip, clip, out=run.cause[slot])
        if slot == 0:  # summed from scratch once per window, so that rounding errors do not accumulate
            run.raw.sum(axis=0, out=run.total)
        else:
            np.add(run.total, ring, out=run.total)
        return np.asarray(ring.max(axis=1))

    def _conclude(self, run: _Run) -> Iterator[Condition]:
        steps = len(run.window.steps)
        mean = run.total / np.float32(steps)
        found = comparison.outliers(run.raw[:steps], run.cause[:steps], mean, self.limits)
        return conditions(run.window, found, self.limits)


# ---------------------------------------------------------------- memory


def _new_run(generation: Generation, mesh: Mesh, limits: StragglerThresholds) -> _Run:
    grid, size, window = Grid.of(mesh), mesh.world_size, limits.window
    shape = (grid.stages, grid.group_size)
    return _Run(
        generation=generation,
        mesh_ranks=size,
        window=Window(grid, generation.node_of, deque(maxlen=window)),
        reports=StepReports(size),
        raw=np.zeros((window, *shape), np.float32),
        cause=np.zeros((window, *shape), np.float32),
        total=np.zeros(shape, np.float32),
        alone=grid.group_size == 1,
        repeat_s=limits.repeat_s,
    )


def _mean_steps(item: ObservedSteps) -> StepColumns:
    """Convert each block to its mean step, which ends with the block."""
    nothing, unknown = (0.0,) * len(item.rank), (math.nan,) * len(item.rank)
    spans = zip(item.started_at, item.ended_at, item.steps, strict=True)
    return StepColumns(
        node=item.node,
        at=item.at,
        job=item.job,
        generation=item.generation,
        rank=item.rank,
        step=item.step,
        started_at=tuple(ended_at - (ended_at - started_at) / count for started_at, ended_at, count in spans),
        ended_at=item.ended_at,
        data_s=nothing,
        stall_s=nothing,
        tokens=(0,) * len(item.rank),
        loss=unknown,
        grad_norm=unknown,
        comm_wait_s=tuple(wait_s / count for wait_s, count in zip(item.comm_wait_s, item.steps, strict=True)),
    )


def _token_excess(tokens: Floats, grid: Grid) -> Floats:
    """Excess of each rank's tokens; zeros if all ranks have the same number, as in most jobs."""
    if tokens.min() == tokens.max():
        return np.zeros((grid.stages, grid.group_size), np.float32)
    return comparison.excess(grid.lay(np.maximum(tokens, np.float32(1.0))))[0]


def _against_past(run: _Run, work: Floats, steps: int) -> Floats | None:
    """Each rank's excess of work relative to its past, compared with the other ranks; None until the past is known."""
    if run.usual is None:
        run.past.append(work)
        if len(run.past) == steps:
            run.usual = np.median(np.stack(run.past), axis=0)
            run.past.clear()
        return None
    grown = (work / run.usual).reshape(1, -1)
    over = comparison.excess(grown)[0] if grown.shape[1] > 1 else grown - np.float32(1.0)
    return over.reshape(work.shape)


def _id(record: StepRecord, key: str, times: int) -> str:
    return f"steps:{record.job}:{record.generation}:{key}" + (f":{times}" if times > 1 else "")


def _over(record: StepRecord, condition: Condition, times: int, now: float) -> Finding:
    """The withdrawal of a reported condition."""
    reported = _id(record, condition.key, times)
    return Finding(
        id=f"{reported}:over:{record.step}",
        kind=condition.kind,
        severity=Severity.INFO,
        at=now,
        since=now,
        summary=f"Over by step {record.step}: {record.job} {condition.what}, since step {condition.since}.",
        node=condition.node,
        rank=condition.rank,
        job=record.job,
        generation=record.generation,
        contradicts=reported,
        evidence={"contradicts": reported},
        recommended_actions=(Remedy.WATCH,),
    )


def _finding(record: StepRecord, condition: Condition, times: int, now: float, repeat_s: float) -> Finding:
    flapping = f" It comes and goes: {times} times so far." if times > 1 else ""
    return Finding(
        id=_id(record, condition.key, times),
        kind=condition.kind,
        severity=Severity.WARNING,
        at=now,
        since=min(record.started_at, now),
        summary=f"{record.job} {condition.what}, since step {condition.since}.{flapping}",
        node=condition.node,
        job=record.job,
        generation=record.generation,
        rank=condition.rank,
        confidence=condition.confidence,
        cost_share=condition.cost_share,
        ttl_s=min(TTL_S, repeat_s / 2),  # within the TTL, the engine drops repeats of the finding
        evidence={**condition.evidence, "since_step": str(condition.since), "times": str(times)},
        recommended_actions=(Remedy.WATCH, Remedy.REPLACE_NODE)
        if condition.kind is FindingKind.STRAGGLER
        else (Remedy.WATCH,),
    )
