"""Goodput sums of steps that are no longer stored, in bounded memory. Pure.

Theory. `goodput` divides a job's life into windows of steps and the gaps between them. Of a window that is over, two things are
needed: its length, tokens and stall within its segment (windows of one generation that are all new or all rework), and where
its work time lies among those of the others, for the fault-free rate. There are as many segments and gaps as generations. Work
times are counted in bins of equal ratio (0.1 %), from which the median and its spread are read. Tokens over time are summed in
buckets, whose width doubles whenever there are too many. So the sums are exact, and the rate is exact to the width of a bin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from holdfast.domain.findings import StepRecord

BINS_PER_UNIT = 1000  # of the logarithm
SEGMENTS_MAX = 10_000
GAPS_MAX = 10_000
CURVE_MAX = 2400


@dataclass(slots=True)
class Segment:
    """Consecutive windows of one generation."""

    generation: int
    new: bool  # no earlier generation had finished their steps
    world_size: int
    length_s: float = 0.0
    tokens: int = 0
    stall_s: float = 0.0
    steps: int = 0  # 0 in sums of an earlier version, whose jobs report tokens or have no useful time


@dataclass(slots=True)
class Gap:
    begin: float
    end: float
    startup: bool  # before the first window


@dataclass(slots=True)
class Bin:
    """Windows of new steps with about the same work time."""

    count: int = 0
    work_s: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class Booked:
    """The windows of one run up to `cursor` (Unix s)."""

    started_at: float
    full_world_size: int
    cursor: float
    reached: int = 0
    generation: int = 0
    windows: int = 0
    tokens: int = 0  # of new steps
    flops: float = 0.0  # of new steps
    rework_steps: int = 0
    first_world_size: int = 0  # of a window of a new step
    other_s: float = 0.0  # total length of gaps that are too old to be stored individually
    segments: list[Segment] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    full: dict[str, Bin] = field(default_factory=dict)  # at the full mesh, by the number of the bin
    shrunk: dict[str, Bin] = field(default_factory=dict)
    curve: list[float] = field(default_factory=list)  # tokens
    curve_s: float = 0.0  # width of one bucket

    @classmethod
    def empty(cls, started_at: float, full_world_size: int) -> Booked:
        return cls(started_at, full_world_size, started_at)

    def add(self, records: Iterable[StepRecord], ended_at: float = math.inf) -> None:
        """Add steps, ordered by (generation, step), that follow the steps added before."""
        for record in records:
            begin = self.cursor
            if record.generation != self.generation:
                begin = max(self.cursor, record.started_at)
            end = min(record.ended_at, ended_at)
            if end > begin:
                self._gap(begin)
                self._window(record, begin, end)

    @property
    def counts_tokens(self) -> bool:
        """Whether steps weigh by their tokens. A job that reports no tokens counts each step as one."""
        return any(each.tokens for each in self.segments)

    def rate(self) -> float:
        """Fault-free tokens (or steps) per second, as defined in `goodput`; 0 if no new step was finished."""
        bins = list((self.full or self.shrunk).values())
        if not bins:
            return 0.0
        median = _median(bins, _mean)
        spread = _median(bins, lambda each: abs(_mean(each) - median))
        kept = [each for each in bins if _mean(each) <= (median + 3 * spread) * (1 + 1 / BINS_PER_UNIT)]
        done = sum(each.tokens if self.counts_tokens else each.count for each in kept)
        rate = done / sum(each.work_s for each in kept)
        return rate if self.full else rate * self.full_world_size / self.first_world_size

    # ------------------------------------------------------------ inside

    def _gap(self, begin: float) -> None:
        if begin > self.cursor:
            self.gaps.append(Gap(self.cursor, begin, self.windows == 0))
        if len(self.gaps) > GAPS_MAX:
            oldest = self.gaps.pop(0)
            self.other_s += oldest.end - oldest.begin

    def _window(self, record: StepRecord, begin: float, end: float) -> None:
        new = record.step > self.reached
        last = self.segments[-1] if self.segments else None
        if last is None or (last.generation, last.new) != (record.generation, new):
            last = Segment(record.generation, new, record.world_size)
            self.segments.append(last)
        last.length_s += end - begin
        last.tokens += record.tokens
        last.steps += 1
        last.stall_s += record.stall_s
        if len(self.segments) > SEGMENTS_MAX:
            self._merge_oldest()
        if new:
            self._measure(record, max(0.0, end - begin - record.stall_s))
        self._draw(record.tokens, begin - self.started_at, end - self.started_at)
        self.tokens += record.tokens if new else 0
        self.flops += record.flops if new else 0.0
        self.rework_steps += not new
        self.windows += 1
        self.cursor, self.reached, self.generation = end, max(self.reached, record.step), record.generation

    def _merge_oldest(self) -> None:
        oldest = self.segments.pop(0)
        like = (s for s in self.segments if (s.new, s.world_size) == (oldest.new, oldest.world_size))
        into = next(like, self.segments[0])
        into.length_s += oldest.length_s
        into.tokens += oldest.tokens
        into.steps += oldest.steps
        into.stall_s += oldest.stall_s

    def _measure(self, record: StepRecord, work_s: float) -> None:
        if work_s <= 0:
            return
        self.first_world_size = self.first_world_size or record.world_size
        bins = self.full if record.world_size >= self.full_world_size else self.shrunk
        each = bins.setdefault(str(round(math.log(work_s) * BINS_PER_UNIT)), Bin())
        each.count += 1
        each.work_s += work_s
        each.tokens += record.tokens

    def _draw(self, tokens: int, first: float, last: float) -> None:
        self.curve_s = self.curve_s or last - first
        while last / self.curve_s >= CURVE_MAX:
            odd = [*self.curve, 0.0] if len(self.curve) % 2 else self.curve
            self.curve = [odd[index] + odd[index + 1] for index in range(0, len(odd), 2)]
            self.curve_s *= 2
        final = int(last / self.curve_s)
        self.curve.extend([0.0] * (final + 1 - len(self.curve)))
        for index in range(int(first / self.curve_s), final + 1):
            overlap = min(last, (index + 1) * self.curve_s) - max(first, index * self.curve_s)
            self.curve[index] += tokens * max(0.0, overlap) / (last - first)


def _mean(each: Bin) -> float:
    return each.work_s / each.count


def _median(bins: Iterable[Bin], value: Callable[[Bin], float]) -> float:
    ordered = sorted(bins, key=value)
    half = sum(each.count for each in ordered) / 2
    seen = 0
    for each in ordered:
        seen += each.count
        if seen >= half:
            return value(each)
    return 0.0
