"""Goodput: divides a job's wall time into classes, every second in exactly one. Pure.

Theory. A job's life is divided at the moments when every rank had finished a step. The *window* of a step is the time since the
previous step of the same generation (for a generation's first step: since that step's own start). Windows are work:

* a step that an earlier generation had already finished is **rework**;
* of a new step, `tokens ÷ fault-free rate` is **useful**; the rest of its window is **stall** (checkpoint copies, as
  the ranks measured them), then **degraded** if fewer ranks than the full mesh worked, then **other**.

A job whose steps report no tokens counts each step as one: at a constant global batch that is the same share of work.

The time between windows is not work. It is divided at the times of the incident that it belongs to: before the fault the lost
part of a step (**rework**), fault → finding **detect**, → decision **decide**, → next window **recover**; **wait** while the
job could not run; **startup** before the first window; **other** after the last. A script that reports no steps has no
windows. The time in which all of its ranks ran is **running**: how much of it was useful, and so the goodput, is unknown.

The fault-free rate is tokens per second over the windows of new steps at the full mesh, without checkpoint stalls and without
the windows beyond median + 3 × MAD (the ideal step of google/ml-goodput-measurement). It is weighted by tokens instead of
steps, because with fewer replicas a step at a constant global batch takes longer.

`job` goodput is useful ÷ wall. `paid` is useful × full-mesh nodes ÷ node-seconds allocated, spares included.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise

from holdfast.domain.findings import StepRecord
from holdfast.supervisor.history.booked import Booked, Gap
from holdfast.supervisor.history.booked import Segment as SegmentSums
from holdfast.supervisor.history.gaps import book_gap, gaps, spans_of_gap
from holdfast.supervisor.history.time_classes import (
    RATE_POINTS_MAX,
    SPANS_MAX,
    Book,
    Class,
    History,
    Inside,
    Ledger,
    Recent,
    Span,
    Window,
)


def account(history: History) -> Ledger:
    """The ledger of one job."""
    if history.booked is not None:
        return _continued(history, history.booked)
    windows = tuple(_windows(history))
    by_tokens = any(window.record.tokens for window in windows)
    rate = _fault_free_rate(windows, history.full_world_size, by_tokens=by_tokens)
    book = Book()
    for segment in _segments(windows):
        _book_sums(book, _sums(segment), rate, history.full_world_size, by_tokens=by_tokens)
    for begin, end, first in gaps(history, windows):
        book_gap(book, history, begin, end, startup=first)
    tokens = sum(window.record.tokens for window in windows if window.new)
    rework = sum(not window.new for window in windows)
    tokens_rate = rate if by_tokens else 0.0
    flops_rate = _flops_rate(rate, [window.record for window in windows if window.new], by_tokens=by_tokens)
    series = _rate_series(history, windows)
    return _ledger(history, book, tokens_rate, flops_rate, tokens, rework, series, measured=bool(windows))


def recent(history: History, since: float) -> Recent:
    """The time from `since` (Unix seconds) on. It begins later where the job does, where a window of a step ends that had begun
    before, and where the kept steps begin."""
    windows = tuple(_windows(history))
    booked = history.booked
    start = min(max(since, history.started_at if booked is None else booked.cursor), history.ended_at)
    start = next((window.end for window in windows if window.begin < start < window.end), start)
    by_tokens = any(window.record.tokens for window in windows)
    rate = _fault_free_rate(windows, history.full_world_size, by_tokens=by_tokens)
    book = Book()
    for segment in _segments(window for window in windows if window.begin >= start):
        _book_sums(book, _sums(segment), rate, history.full_world_size, by_tokens=by_tokens)
    for begin, end, first in gaps(history, windows):
        book_gap(book, history, max(begin, start), end, startup=first and not (booked and booked.windows))
    return Recent(start, history.ended_at, book.seconds)


def within(history: History, since: float, until: float) -> Inside:
    """The time from `since` until `until` (Unix seconds). It begins later in the cases that `recent` names."""
    until = min(until, history.ended_at)
    part = replace(
        history,
        ended_at=until,
        steps=[record for record in history.steps if record.ended_at <= until],
        waits=[(begin, min(end, until)) for begin, end in history.waits if begin < until],
        unmeasured=[(begin, min(end, until)) for begin, end in history.unmeasured if begin < until],
    )
    seconds = recent(part, since)
    windows = [window for window in _windows(part) if window.begin >= seconds.since]
    by_tokens = any(window.record.tokens for window in windows)
    rate = _fault_free_rate(windows, history.full_world_size, by_tokens=by_tokens)
    new = [window.record for window in windows if window.new]
    return Inside(
        seconds.since,
        seconds.until,
        seconds.seconds,
        fault_free_tokens_per_s=rate if by_tokens else 0.0,
        fault_free_flops_per_s=_flops_rate(rate, new, by_tokens=by_tokens),
        tokens=sum(record.tokens for record in new),
        rework_steps=len(windows) - len(new),
    )


def spans(history: History) -> tuple[Span, ...]:
    """What the job did when, oldest first, from its submission or from the first step that is kept. A stretch of steps is one
    span: useful, degraded or rework. Of more than `SPANS_MAX`, too short ones belong to the one before."""
    windows = tuple(_windows(history))
    booked = history.booked
    start = history.started_at if booked is None else booked.cursor
    found = [_span_of_segment(segment, history.full_world_size) for segment in _segments(windows)]
    for begin, end, first in gaps(history, windows):
        startup = first and not (booked and booked.windows)
        found += spans_of_gap(history, max(begin, start), end, startup=startup)
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
    book: Book,
    tokens_rate: float,
    flops_rate: float,
    tokens: int,
    rework_steps: int,
    series: tuple[tuple[float, float], ...],
    *,
    measured: bool,
) -> Ledger:
    """`measured`: whether any step was reported."""
    wall_s = max(0.0, history.ended_at - history.started_at)
    useful = book.seconds[Class.USEFUL]
    paid = _integral(history.paid_nodes, history.started_at, history.ended_at) or wall_s * history.full_nodes
    known = measured or not book.seconds[Class.RUNNING]
    return Ledger(
        wall_s=wall_s,
        seconds=book.seconds,
        goodput_job=(useful / wall_s if wall_s else 0.0) if known else None,
        goodput_paid=(min(1.0, useful * history.full_nodes / paid) if paid else 0.0) if known else None,
        fault_free_tokens_per_s=tokens_rate,
        fault_free_flops_per_s=flops_rate,
        tokens=tokens,
        rework_steps=rework_steps,
        world_sizes=((0.0, 0), *((round(at - history.started_at, 3), size) for at, size in history.world_sizes)),
        tokens_per_s=series,
    )


def _continued(history: History, before: Booked) -> Ledger:
    """Like `account`, for a job whose first steps are known only by their sums."""
    sums = deepcopy(before)
    ordered = sorted(history.steps, key=lambda record: (record.generation, record.step))
    sums.add(ordered, history.ended_at)
    rate, book = sums.rate(), Book()
    for each in sums.segments:
        _book_sums(book, each, rate, history.full_world_size, by_tokens=sums.counts_tokens)
    for gap in (*sums.gaps, Gap(sums.cursor, history.ended_at, sums.windows == 0)):
        book_gap(book, history, gap.begin, gap.end, startup=gap.startup)
    book.add(Class.OTHER, sums.other_s)
    tokens_rate = rate if sums.counts_tokens else 0.0
    return _ledger(
        history,
        book,
        tokens_rate,
        rate * sums.flops / (sums.tokens if sums.counts_tokens else sums.windows - sums.rework_steps) if rate else 0.0,
        sums.tokens,
        sums.rework_steps,
        _coarse_series(sums),
        measured=bool(sums.windows),
    )


def _coarse_series(sums: Booked) -> tuple[tuple[float, float], ...]:
    """Tokens per second over time, in at most `RATE_POINTS_MAX` points."""
    each = -(-len(sums.curve) // RATE_POINTS_MAX) or 1
    width_s = each * sums.curve_s
    groups = (sums.curve[start : start + each] for start in range(0, len(sums.curve), each))
    return tuple((round((index + 0.5) * width_s, 3), sum(group) / width_s) for index, group in enumerate(groups))


def _windows(history: History) -> Iterator[Window]:
    """Windows of the steps after those that are booked, in order of time, clipped so that they do not overlap (the clocks of
    two nodes may differ a little)."""
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
    """Runs of windows of one generation that are all new or all rework, so that jitter between their steps averages out."""
    segment: list[Window] = []
    for window in windows:
        if segment and (segment[-1].record.generation, segment[-1].new) != (window.record.generation, window.new):
            yield segment
            segment = []
        segment.append(window)
    if segment:
        yield segment


def _fault_free_rate(windows: Sequence[Window], full_world_size: int, *, by_tokens: bool) -> float:
    """Tokens (or steps) per second; 0 if no new step was finished."""
    new = [window for window in windows if window.new and window.work_s > 0]
    healthy = [window for window in new if window.record.world_size >= full_world_size] or new
    if not healthy:
        return 0.0
    median = statistics.median(window.work_s for window in healthy)
    spread = statistics.median(abs(window.work_s - median) for window in healthy)
    kept = [window for window in healthy if window.work_s <= median + 3 * spread]
    done = sum(window.record.tokens if by_tokens else 1 for window in kept)
    rate = done / sum(window.work_s for window in kept)
    # a job that never ran at its full size: assume that the missing ranks would have worked as fast as the present ones
    return rate * full_world_size / healthy[0].record.world_size


def _flops_rate(rate: float, new: Sequence[StepRecord], *, by_tokens: bool) -> float:
    """Fault-free FLOP/s: the fault-free rate times the FLOPs that new steps have reported per token, or per step."""
    done = sum(record.tokens for record in new) if by_tokens else len(new)
    return rate * sum(record.flops for record in new) / done if done else 0.0


def _sums(segment: Sequence[Window]) -> SegmentSums:
    first = segment[0]
    return SegmentSums(
        first.record.generation,
        first.new,
        first.record.world_size,
        sum(window.end - window.begin for window in segment),
        sum(window.record.tokens for window in segment),
        sum(window.record.stall_s for window in segment),
        len(segment),
    )


def _book_sums(book: Book, segment: SegmentSums, rate: float, full_world_size: int, *, by_tokens: bool) -> None:
    length = segment.length_s
    if not segment.new:
        book.add(Class.REWORK, length)
        return
    done = segment.tokens if by_tokens else segment.steps
    useful = min(length, done / rate) if rate else 0.0
    stall = min(length - useful, segment.stall_s)
    degraded = segment.world_size < full_world_size
    book.add(Class.USEFUL, useful)
    book.add(Class.STALL, stall)
    book.add(Class.DEGRADED if degraded else Class.OTHER, length - useful - stall)


def _integral(series: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """∫ value dt over [begin, end] of a step function."""
    total = 0.0
    for (at, value), (until, _) in pairwise([*series, (end, 0)]):
        total += value * max(0.0, min(until, end) - max(at, begin))
    return total


def _rate_series(history: History, windows: Sequence[Window]) -> tuple[tuple[float, float], ...]:
    """Tokens per second over time: means over buckets of equal length; 0 where no step was finished."""
    wall_s = history.ended_at - history.started_at
    if not windows or wall_s <= 0:
        return ()
    # a bucket contains several steps, so that the curve shows rates and not the rhythm of single steps
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
