"""Detects a rank whose own gradient, before the reduce, differs from those of its comparison group.

After the reduce, a wrong gradient is in every replica, and all replicas are wrong in the same way. Before the reduce, ranks at
the same position of different replicas have gradients of the same parameters for different data, and their norms scatter. A
norm is an outlier if it is several times the median of the others, or not a number while the others are. Most flipped bits
change a norm by less than the scatter and are not detected, and an unusual batch looks like a faulty device. The finding is
therefore a warning, which names rank and node and counts the occurrences.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.comparison import median_of_others
from holdfast.diagnostics.detectors.protocol import Findings, Observed
from holdfast.diagnostics.detectors.recurring import Recurring
from holdfast.diagnostics.roster import Generation, Roster, RunStarted
from holdfast.diagnostics.thresholds import GradientThresholds
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import StepColumns

_JOBS_MAX = 4096
_OPEN_MAX = 16
_NAMED_MAX = 8
_MAD_TO_SIGMA = 1.4826
_TINY = 1e-30


@dataclass(slots=True)
class _Open:
    norms: array[float]  # by rank; NaN = not reported, +inf = not a number
    reports: int = 0


@dataclass(slots=True)
class _Job:
    generation: Generation
    scatter: deque[float]  # robust sigma of the logarithms, by step
    open: Bounded[int, _Open] = field(default_factory=lambda: Bounded(_OPEN_MAX))
    seen: dict[int, int] = field(default_factory=dict)  # rank → number of steps at which it was an outlier
    reported: Recurring[_Outlier] = field(default_factory=Recurring)


@dataclass(slots=True)
class GradientState:
    jobs: Bounded[str, _Job] = field(default_factory=lambda: Bounded(_JOBS_MAX))


@dataclass(frozen=True, slots=True)
class _Outlier:
    rank: int
    norm: float
    usual: float

    @property
    def key(self) -> str:
        return str(self.rank)

    @property
    def members(self) -> frozenset[int]:
        return frozenset()


@dataclass(frozen=True, slots=True)
class GradientOutlier:
    """Reports NUMERICAL, a warning about one rank."""

    reads: ClassVar = (StepColumns, RunStarted)
    initial = GradientState
    limits: GradientThresholds = field(default_factory=GradientThresholds)

    def observe(
        self, state: GradientState, item: Observed, now: float, roster: Roster
    ) -> tuple[GradientState, Findings]:
        match item:
            case StepColumns() if item.local_grad_norm:
                generation = roster.current(item.job, item.generation)
                mesh = None if generation is None else generation.mesh
                if generation is not None and mesh is not None and mesh.dp >= self.limits.replicas_min:
                    return state, tuple(self._collect(self._job(state, generation), mesh, item, now))
            case RunStarted():
                state.jobs.pop(item.job, None)
            case _:
                pass
        return state, ()

    def _job(self, state: GradientState, generation: Generation) -> _Job:
        job = state.jobs.get(generation.job)
        if job is None:
            job = state.jobs[generation.job] = _Job(generation, deque(maxlen=self.limits.history))
        if job.generation is not generation:
            job.generation = generation
            job.open.clear()
            job.seen.clear()
        return job

    def _collect(self, job: _Job, mesh: Mesh, item: StepColumns, now: float) -> Iterator[Finding]:
        for rank, number, norm in zip(item.rank, item.step, item.local_grad_norm, strict=True):
            if norm != norm or rank >= mesh.world_size:
                continue
            step = job.open.get(number)
            if step is None:
                step = job.open[number] = _Open(array("d", (math.nan,)) * mesh.world_size)
            before = step.norms[rank]
            step.reports += before != before
            step.norms[rank] = norm
            if step.reports == mesh.world_size:
                for done in [one for one in job.open if one <= number]:
                    del job.open[done]
                yield from self._judge(job, mesh, item, number, np.frombuffer(step.norms), now)

    def _judge(
        self, job: _Job, mesh: Mesh, item: StepColumns, number: int, norms: NDArray[np.float64], now: float
    ) -> Iterator[Finding]:
        limits = self.limits
        by_position = norms.reshape(-1, mesh.dp, mesh.stride).swapaxes(1, 2).reshape(-1, mesh.dp)
        logs = np.log(np.clip(by_position, _TINY, 1 / _TINY)).astype(np.float32)
        usual, _ = median_of_others(logs)
        over = logs - usual
        sigma = _MAD_TO_SIGMA * float(np.median(np.abs(over)))
        bar = max(math.log(limits.factor), limits.z * float(np.median(job.scatter or [sigma])))
        is_odd = over > bar
        if len(job.scatter) < limits.history_min:
            is_odd &= np.isinf(by_position)  # the usual scatter is not known yet
        job.scatter.append(sigma)
        found = [
            _Outlier(mesh.ranks_at(int(position))[replica], norm, math.exp(usual[position, replica]))
            for position, replica in np.argwhere(is_odd)
            for norm in (float(by_position[position, replica]),)
        ]
        for outlier in found:
            job.seen[outlier.rank] = job.seen.get(outlier.rank, 0) + 1
        if len(found) > max(1, limits.share_max * mesh.world_size):
            return  # with many outliers at once, the cause is the data or the job itself
        for due in job.reported.due(found, number, now, limits.quiet_steps, limits.repeat_s):
            yield _finding(job, item, due.condition, number, now)


def _finding(job: _Job, item: StepColumns, outlier: _Outlier, number: int, now: float) -> Finding:
    node = job.generation.node_of.get(outlier.rank, "")
    size = "not a number" if math.isinf(outlier.norm) else f"{outlier.norm:.4g}"
    return Finding(
        id=f"gradient_outlier:{item.job}:{item.generation}:{outlier.rank}:{number}",
        kind=FindingKind.NUMERICAL,
        severity=Severity.WARNING,
        at=now,
        since=min(item.at, now),
        summary=(
            f"{item.job}: the gradient of rank {outlier.rank} on {node} had the norm {size} before it was reduced at step "
            f"{number}; its peers' median is {outlier.usual:.4g}."
        ),
        node=node,
        job=item.job,
        generation=item.generation,
        rank=outlier.rank,
        confidence=0.6,
        evidence={
            "rule": "local_gradient_norm",
            "value": "local_grad_norm",
            "norm": size,
            "usual": f"{outlier.usual:.6g}",
            "step": str(number),
            "times": str(job.seen[outlier.rank]),
        },
        recommended_actions=(Remedy.WATCH, Remedy.REPLACE_NODE),
    )
