"""Combines the steps of single ranks into steps of the job: one record when every rank has finished a step. Pure.

Step columns are telemetry and may be dropped: with thousands of nodes, at least one report is missing for nearly every step. A
step is therefore finished when every rank has reported this step *or a later one*, because a rank that finished step n + 1 has
finished step n. The sums of a step lack the values of dropped reports.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import sub
from typing import TypeVar

from holdfast.diagnostics.bounded import Bounded
from holdfast.domain.findings import StepRecord
from holdfast.domain.signals import GenerationStarted, StepColumns

_GENERATIONS_MAX = 4096
_OPEN_STEPS_MAX = 256  # per generation; ranks are never this far apart

Key = tuple[str, int]  # (job, generation)
N = TypeVar("N", int, float)


@dataclass(slots=True)
class _Step:
    """Sums over the ranks that have finished the step so far."""

    ranks: int = 0
    # The longest duration of any rank by its own clock, because the clocks of two machines may differ by an hour.
    duration_s: float = 0.0
    ended_at: float = -math.inf
    tokens: int = 0
    loss: float = 0.0
    losses: int = 0
    stall_s: float = 0.0
    flops: float = 0.0

    def add(self, columns: StepColumns, rows: Sequence[int]) -> None:
        """Add these rows of a node's report, at least one."""
        self.ranks += len(rows)
        started_at, ended_at = _pick(columns.started_at, rows), _pick(columns.ended_at, rows)
        self.duration_s = max(self.duration_s, *map(sub, ended_at, started_at))
        self.ended_at = max(self.ended_at, *ended_at)
        self.tokens += sum(_pick(columns.tokens, rows))
        self.stall_s = max(self.stall_s, *_pick(columns.stall_s, rows))
        if columns.flops:
            self.flops += sum(_pick(columns.flops, rows))
        losses = [loss for loss in _pick(columns.loss, rows) if loss == loss]  # NaN: not reported
        self.loss += sum(losses)
        self.losses += len(losses)


@dataclass(slots=True)
class _Generation:
    world_size: int
    ranks_at: dict[int, int]  # step → number of ranks with this newest step; few entries, however many ranks
    # Rank → its newest step, for ranks that have reported one. Repeated and late reports do not change it. `world_size` is a
    # number that a node reported, so this table grows with the ranks that have reported and is not allocated in advance.
    finished: dict[int, int] = field(default_factory=dict)
    slowest: int = -1  # the smallest key of `ranks_at`: the newest step that all ranks have finished
    open: Bounded[int, _Step] = field(default_factory=lambda: Bounded(_OPEN_STEPS_MAX))

    def advance(self, rank: int, step: int) -> None:
        """Record that `rank` has finished `step`, a later step than before."""
        before, self.finished[rank] = self.finished.get(rank, -1), step
        self._move(1, before, step)

    def advance_together(self, ranks: Sequence[int], step: int) -> bool:
        """Record that all these ranks have finished `step`, if it is later than the step that they all had finished before.
        Returns False, and records nothing, if they differ or some rank is not of this generation."""
        known = set(map(self.finished.get, ranks))
        before = known.pop()
        if known or len(set(ranks)) < len(ranks) or max(ranks) >= self.world_size:
            return False
        if before is None:
            before = -1
        if before >= step:
            return False
        self.finished.update(dict.fromkeys(ranks, step))
        self._move(len(ranks), before, step)
        return True

    def _move(self, count: int, before: int, step: int) -> None:
        self.ranks_at[step] = self.ranks_at.get(step, 0) + count
        self.ranks_at[before] -= count
        if not self.ranks_at[before]:
            del self.ranks_at[before]
            if before == self.slowest:
                self.slowest = min(self.ranks_at)


@dataclass(slots=True)
class StepState:
    generations: Bounded[Key, _Generation] = field(default_factory=lambda: Bounded(_GENERATIONS_MAX))


def started(state: StepState, item: GenerationStarted) -> None:
    """Record the number of ranks of a generation. Each node reports the start; the first report is enough."""
    key = (item.job, item.generation)
    if key in state.generations:
        return
    # the previous generation is kept: its late ticks still count
    state.generations.pop((item.job, item.generation - 2), None)
    follow(state, key, item.mesh.world_size)


def follow(state: StepState, key: Key, world_size: int) -> None:
    """Combine the steps of this generation from now on."""
    state.generations[key] = _Generation(world_size, {-1: world_size})


def forget(state: StepState, job: str) -> None:
    """Drop the steps of an earlier run of `job`."""
    for key in [key for key in state.generations if key[0] == job]:
        del state.generations[key]


def fold(state: StepState, columns: StepColumns) -> tuple[StepRecord, ...]:
    """Add one node's finished steps; returns the steps that are now complete, in order. Updates `state` in place."""
    generation = state.generations.get((columns.job, columns.generation))
    if generation is None:
        return ()  # the number of ranks is not known yet; agents report it on every new stream
    before = generation.slowest
    for step, rows in _by_step(columns):
        if generation.advance_together(_pick(columns.rank, rows), step):
            generation.open.get_or_add(step, _Step).add(columns, rows)
            continue
        new = [
            i
            for i in rows
            if (rank := columns.rank[i]) < generation.world_size and step > generation.finished.get(rank, -1)
        ]
        if not new:
            continue
        for i in new:
            generation.advance(columns.rank[i], step)
        generation.open.get_or_add(step, _Step).add(columns, new)
    if generation.slowest == before:
        return ()
    done = sorted(step for step in generation.open if step <= generation.slowest)
    return tuple(_record(columns, generation, step) for step in done)


def _by_step(columns: StepColumns) -> Iterable[tuple[int, Sequence[int]]]:
    """Return (step, rows) in order of first occurrence. Nearly always the rows of a step follow one another."""
    steps = columns.step
    blocks = list[tuple[int, Sequence[int]]]()
    for step in dict.fromkeys(steps):
        first, count = steps.index(step), steps.count(step)
        if steps[first : first + count] != (step,) * count:
            break
        blocks.append((step, range(first, first + count)))
    else:
        return blocks
    rows: dict[int, list[int]] = {}
    for i, step in enumerate(steps):
        rows.setdefault(step, []).append(i)
    return rows.items()


def _pick(column: Sequence[N], rows: Sequence[int]) -> Sequence[N]:
    if isinstance(rows, range):
        return column[rows.start : rows.stop]
    return [column[i] for i in rows]


def _record(columns: StepColumns, generation: _Generation, step: int) -> StepRecord:
    sums = generation.open.pop(step)
    return StepRecord(
        job=columns.job,
        generation=columns.generation,
        step=step,
        world_size=generation.world_size,
        started_at=sums.ended_at - sums.duration_s,
        ended_at=sums.ended_at,
        tokens=sums.tokens,
        loss=sums.loss / sums.losses if sums.losses else None,
        stall_s=sums.stall_s,
        flops=sums.flops,
    )
