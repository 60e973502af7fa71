"""Goodput: where a job's wall time went, every second in exactly one class. Pure.

Theory. A job's life is cut at the moments when a step was finished by every rank. The *window* of a step is the time since
the step before it in the same generation (for a generation's first step, since that step's own start). Windows are work:

* a step that an earlier generation had already finished is **rework**;
* of a new step, `tokens ÷ fault-free rate` is **useful**; what its window took longer is **stall** (checkpoint copies, as
  the ranks measured them), then **degraded** when fewer ranks than the full mesh worked, then **other**.

What lies between windows is no work. It is cut at the times of the incident that it belongs to: until the fault the lost
part of a step (**rework**), fault → finding **detect**, → decision **decide**, → next window **recover**; **wait** while the
job had no way to run; **startup** before the first window; **other** after the last.

The fault-free rate is tokens per second over the windows of new steps at the full mesh, without checkpoint stalls and
without the windows beyond median + 3 × MAD (the ideal step of google/ml-goodput-measurement). Weighting by tokens and not
by steps keeps a shrunken mesh honest: with fewer replicas a step at a constant global batch takes longer.

`job` goodput is useful ÷ wall. `paid` is useful × full-mesh nodes ÷ node-seconds paid for, spares included.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

from holdfast.domain.findings import StepRecord
from holdfast.domain.incidents import Incident
from holdfast.policy import ACTIONS, Effect
from holdfast.supervisor.history.booked import Booked, Gap
from holdfast.supervisor.history.booked import Segment as SegmentSums

RATE_POINTS_MAX = 600  # of the tokens/s series: enough for any screen
SPANS_MAX = 2000  # likewise


class Class(StrEnum):
    USEFUL = "useful"
    STARTUP = "startup"
    DETECT = "detect"
    DECIDE = "decide"
    RECOVER = "recover"
    REWORK = "rework"
    STALL = "stall"
    WAIT = "wait"
    DEGRADED = "degraded"
    OTHER = "other"


BADPUT = tuple(name for name in Class if name is not Class.USEFUL)


@dataclass(frozen=True, slots=True)
class History:
    """What the ledger is made from. Times are Unix seconds; series hold (time, value from then on), ascending."""

    started_at: float  # submission
    ended_at: float  # the end of the job, or now
    full_world_size: int
    full_nodes: int
    steps: Sequence[StepRecord] = ()
    incidents: Sequence[Incident] = ()
    waits: Sequence[tuple[float, float]] = ()  # (from, to) when the job had no way to run
    world_sizes: Sequence[tuple[float, int]] = ()  # ranks of the running generation
    paid_nodes: Sequence[tuple[float, int]] = ()  # nodes of this job and its spares
    booked: Booked | None = None  # what the steps before `steps` have added up to; None = these are all


@dataclass(frozen=True, slots=True)
class Ledger:
    """Seconds by class, which add up to `wall_s`; times in the series are seconds since submission."""

    wall_s: float
    seconds: dict[Class, float]
    goodput_job: float
    goodput_paid: float
    fault_free_tokens_per_s: float
    tokens: int  # of new steps
    rework_steps: int
    world_sizes: tuple[tuple[float, int], ...]
    tokens_per_s: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Window:
    begin: float
    end: float
    record: StepRecord
    new: bool  # no earlier generation had finished this step

    @property
    def work_s(self) -> float:
        """Its length without the checkpoint stall."""
        return max(0.0, self.end - self.begin - self.record.stall_s)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a job's time, of one class. Unix seconds."""

    begin: float
    end: float
    kind: Class


@dataclass(frozen=True, slots=True)
class Recent:
    """Seconds by class of the latest part of a job's time, which add up to `until - since`. Unix seconds."""

    since: float
    until: float
    seconds: Mapping[Class, float]


@dataclass(slots=True)
class _Book:
    seconds: dict[Class, float] = field(default_factory=lambda: dict.fromkeys(Class, 0.0))

    def add(self, name: Class, seconds: float) -> None:
        self.seconds[name] += max(0.0, seconds)


def account(history: History) -> Ledger:
    """The ledger of one job."""
    if history.booked is not None:
        return _continued(history, history.booked)
    windows = tuple(_windows(history))
    rate = _fault_free_rate(windows, history.full_world_size)
    book = _Book()
    for segment in _segments(windows):
        _book_segment(book, segment, rate, history.full_world_size)
    for begin, end, first in _gaps(history, windows):
        _book_gap(book, history, begin, end, startup=first)
    tokens = sum(window.record.tokens for window in windows if window.new)
    rework = sum(not window.new for window in windows)
    return _ledger(history, book, rate, tokens, rework, _rate_series(history, windows))


def recent(history: History, since: float) -> Recent:
    """The time from `since` (Unix seconds) on. It begins later where the job does, where a window of a step ends that had begun
    before, and where the kept steps begin."""
    windows = tuple(_windows(history))
    booked = history.booked
    start = min(max(since, history.started_at if booked is None else booked.cursor), history.ended_at)
    start = next((window.end for window in windows if window.begin < start < window.end), start)
    rate = _fault_free_rate(windows, history.full_world_size)
    book = _Book()
    for segment in _segments(window for window in windows if window.begin >= start):
        _book_segment(book, segment, rate, history.full_world_size)
    for begin, end, first in _gaps(history, windows):
        _book_gap(book, history, max(begin, start), end, startup=first and not (booked and booked.windows))
    return Recent(start, history.ended_at, book.seconds)


def spans(history: History) -> tuple[Span, ...]:
    """What the job did when, oldest first, from its submission or from the first step that is kept. A stretch of steps is one
    span: useful, degraded or rework. Of more than `SPANS_MAX`, too short ones belong to the one before."""
    windows = tuple(_windows(history))
    booked = history.booked
    start = history.started_at if booked is None else booked.cursor
    found = [_span_of_segment(segment, history.full_world_size) for segment in _segments(windows)]
    for begin, end, first in _gaps(history, windows):
        startup = first and not (booked and booked.windows)
        found += _spans_of_gap(history, max(begin, start), end, startup=startup)
    found.sort(key=lambda span: span.begin)
    shortest_s = (history.ended_at - start) / SPANS_MAX if len(found) > SPANS_MAX else 0.0
    drawn: list[Span] = []
    for span in found:
        if drawn and (span.kind is drawn[-1].kind or span.end - span.begin < shortest_s):
            drawn[-1] = Span(drawn[-1].begin, span.end, drawn[-1].kind)
        else:
            drawn.append(span)
    return tuple(drawn)


def _span_of_segment(segment: Sequence[Window], full_world_size: int) -> Span:
    first = segment[0]
    shrunk = first.record.world_size < full_world_size
    kind = Class.REWORK if not first.new else Class.DEGRADED if shrunk else Class.USEFUL
    return Span(first.begin, segment[-1].end, kind)


def _ledger(
    history: History,
    book: _Book,
    rate: float,
    tokens: int,
    rework_steps: int,
    series: tuple[tuple[float, float], ...],
) -> Ledger:
    wall_s = max(0.0, history.ended_at - history.started_at)
    useful = book.seconds[Class.USEFUL]
    paid = _integral(history.paid_nodes, history.started_at, history.ended_at) or wall_s * history.full_nodes
    return Ledger(
        wall_s=wall_s,
        seconds=book.seconds,
        goodput_job=useful / wall_s if wall_s else 0.0,
        goodput_paid=min(1.0, useful * history.full_nodes / paid) if paid else 0.0,
        fault_free_tokens_per_s=rate,
        tokens=tokens,
        rework_steps=rework_steps,
        world_sizes=((0.0, 0), *((round(at - history.started_at, 3), size) for at, size in history.world_sizes)),
        tokens_per_s=series,
    )


def _continued(history: History, before: Booked) -> Ledger:
    """As `account`, where the first steps are known by their sums alone."""
    sums = deepcopy(before)
    ordered = sorted(history.steps, key=lambda record: (record.generation, record.step))
    sums.add(ordered, history.ended_at)
    rate, book = sums.rate(), _Book()
    for each in sums.segments:
        _book_sums(book, each, rate, history.full_world_size)
    for gap in (*sums.gaps, Gap(sums.cursor, history.ended_at, sums.windows == 0)):
        _book_gap(book, history, gap.begin, gap.end, startup=gap.startup)
    book.add(Class.OTHER, sums.other_s)
    return _ledger(history, book, rate, sums.tokens, sums.rework_steps, _coarse_series(sums))


def _coarse_series(sums: Booked) -> tuple[tuple[float, float], ...]:
    """Tokens per second over time, in at most `RATE_POINTS_MAX` points."""
    each = -(-len(sums.curve) // RATE_POINTS_MAX) or 1
    width_s = each * sums.curve_s
    groups = (sums.curve[start : start + each] for start in range(0, len(sums.curve), each))
    return tuple((round((index + 0.5) * width_s, 3), sum(group) / width_s) for index, group in enumerate(groups))


def _windows(history: History) -> Iterator[Window]:
    """Windows in order of time, clipped so that none overlaps the one before it (clocks of two nodes may differ a little); of
    the steps after those that are booked."""
    cursor, reached = history.started_at, 0
    generation: int | None = None
    if (booked := history.booked) is not None:
        cursor, reached, generation = booked.cursor, booked.reached, booked.generation
    for record in sorted(history.steps, key=lambda record: (record.generation, record.step)):
        begin = max(cursor, record.started_at) if record.generation != generation else cursor
        end = min(record.ended_at, history.ended_at)
        if end <= begin:
            continue  # a repeat, or a record from outside the job's life
        yield Window(begin, end, record, new=record.step > reached)
        cursor, reached, generation = end, max(reached, record.step), record.generation


def _segments(windows: Iterable[Window]) -> Iterator[list[Window]]:
    """Runs of windows of one generation that are all new or all rework: jitter between their steps evens out."""
    segment: list[Window] = []
    for window in windows:
        if segment and (segment[-1].record.generation, segment[-1].new) != (window.record.generation, window.new):
            yield segment
            segment = []
        segment.append(window)
    if segment:
        yield segment


def _fault_free_rate(windows: Sequence[Window], full_world_size: int) -> float:
    """Tokens per second; 0 when no new step was ever finished."""
    new = [window for window in windows if window.new and window.work_s > 0 and window.record.tokens > 0]
    healthy = [window for window in new if window.record.world_size >= full_world_size] or new
    if not healthy:
        return 0.0
    median = statistics.median(window.work_s for window in healthy)
    spread = statistics.median(abs(window.work_s - median) for window in healthy)
    kept = [window for window in healthy if window.work_s <= median + 3 * spread]
    rate = sum(window.record.tokens for window in kept) / sum(window.work_s for window in kept)
    # a job that never ran at its full size: assume that the missing ranks would have worked as fast as the present ones
    return rate * full_world_size / healthy[0].record.world_size


def _book_segment(book: _Book, segment: Sequence[Window], rate: float, full_world_size: int) -> None:
    first = segment[0]
    sums = SegmentSums(
        first.record.generation,
        first.new,
        first.record.world_size,
        sum(window.end - window.begin for window in segment),
        sum(window.record.tokens for window in segment),
        sum(window.record.stall_s for window in segment),
    )
    _book_sums(book, sums, rate, full_world_size)


def _book_sums(book: _Book, segment: SegmentSums, rate: float, full_world_size: int) -> None:
    length = segment.length_s
    if not segment.new:
        book.add(Class.REWORK, length)
        return
    useful = min(length, segment.tokens / rate) if rate else 0.0
    stall = min(length - useful, segment.stall_s)
    degraded = segment.world_size < full_world_size
    book.add(Class.USEFUL, useful)
    book.add(Class.STALL, stall)
    book.add(Class.DEGRADED if degraded else Class.OTHER, length - useful - stall)


def _gaps(history: History, windows: Sequence[Window]) -> Iterator[tuple[float, float, bool]]:
    """(begin, end, before the first window) of the time that no window covers."""
    if not windows:
        yield history.started_at, history.ended_at, True
        return
    yield history.started_at, windows[0].begin, True
    for before, after in pairwise(windows):
        yield before.end, after.begin, False
    yield windows[-1].end, history.ended_at, False


def _book_gap(book: _Book, history: History, begin: float, end: float, *, startup: bool) -> None:
    for span in _spans_of_gap(history, begin, end, startup=startup):
        book.add(span.kind, span.end - span.begin)


def _spans_of_gap(history: History, begin: float, end: float, *, startup: bool) -> Iterator[Span]:
    """Cut the gap at every boundary that falls into it and classify the pieces."""
    if end <= begin:
        return
    marks = {begin, end}
    for incident in history.incidents:
        marks.update(mark for mark in _marks(incident) if mark is not None and begin < mark < end)
    for wait in history.waits:
        marks.update(mark for mark in wait if begin < mark < end)
    struck = [incident for incident in history.incidents if _takes_part(incident, begin, end)]
    for piece_begin, piece_end in pairwise(sorted(marks)):
        kind = _class_of(history, struck, (piece_begin + piece_end) / 2, startup=startup)
        yield Span(piece_begin, piece_end, kind)


def _takes_part(incident: Incident, begin: float, end: float) -> bool:
    """Whether it may be the reason of a gap. What was planned or warned of and led to no change is none."""
    if incident.planned and incident.closed and incident.t_first_step is None:
        return False
    return _began(incident) < end and (incident.t_first_step is None or incident.t_first_step > begin)


def _began(incident: Incident) -> float:
    """When it may have stopped the run: a planned change does so once it is decided."""
    if not incident.planned:
        return incident.t_fault
    return math.inf if incident.t_decided is None else incident.t_decided


def _class_of(history: History, struck: Sequence[Incident], at: float, *, startup: bool) -> Class:
    if any(begin <= at < end for begin, end in history.waits):
        return Class.WAIT
    present = [incident for incident in struck if _began(incident) <= at]
    if not present:
        if startup:
            return Class.STARTUP
        # between the last finished step and the fault the ranks worked on a step that was lost
        return Class.REWORK if struck else Class.OTHER
    # of several incidents at once, the one that is furthest decides: its change of generation is under way
    return max((_stage(incident, at) for incident in present), key=_STAGES.index)


_STAGES = (Class.DETECT, Class.DECIDE, Class.WAIT, Class.RECOVER)


def _stage(incident: Incident, at: float) -> Class:
    if at < incident.t_detected:
        return Class.DETECT
    if incident.t_decided is None or at < incident.t_decided:
        return Class.DECIDE
    if incident.action is not None and ACTIONS[incident.action.kind].effect is Effect.WAIT:
        return Class.WAIT
    return Class.RECOVER


def _marks(incident: Incident) -> tuple[float | None, ...]:
    return (incident.t_fault, incident.t_detected, incident.t_decided, incident.t_first_step)


def _integral(series: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """∫ value dt over [begin, end] of a step function."""
    total = 0.0
    for (at, value), (until, _) in pairwise([*series, (end, 0)]):
        total += value * max(0.0, min(until, end) - max(at, begin))
    return total


def _rate_series(history: History, windows: Sequence[Window]) -> tuple[tuple[float, float], ...]:
    """Tokens per second over time: means over buckets of equal length, 0 where nothing was finished."""
    wall_s = history.ended_at - history.started_at
    if not windows or wall_s <= 0:
        return ()
    # a bucket holds several steps, so that the curve shows rates and not the beat of single steps
    typical_s = statistics.median(window.end - window.begin for window in windows)
    bucket_s = max(wall_s / RATE_POINTS_MAX, 5 * typical_s)
    tokens = [0.0] * (int(wall_s / bucket_s) + 1)
    for window in windows:
        first, last = window.begin - history.started_at, window.end - history.started_at
        for index in range(int(first / bucket_s), int(last / bucket_s) + 1):
            overlap = min(last, (index + 1) * bucket_s) - max(first, index * bucket_s)
            tokens[index] += window.record.tokens * max(0.0, overlap) / (last - first)
    return tuple(
        (round((index + 0.5) * bucket_s, 3), value / min(bucket_s, max(wall_s - index * bucket_s, 1e-9)))
        for index, value in enumerate(tokens)
    )
