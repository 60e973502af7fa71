"""Measures the cost of a warning by the job's step times before and after it. Pure.

A port, a disk or a counter that gets worse does not show its cost. The job does: if its steps take longer since then, and there
was no other finding at that time, the condition is the best explanation. It is no proof, because a job may become slower by
itself at that moment. So such a cost has at most half confidence (`SURE_MAX`), and counts only if it is clear:

    steps    ────────────────────────┐                     ┌──── now
             before (`FROM_BUCKETS`)  │ began, was reported │ since (`SINCE_BUCKETS`)

* Step times are kept as medians of two minutes each, for an hour of one generation: another generation has other nodes.
* Enough of them must lie before the condition began and after it was first reported. The time in between, and `LAG_S` before
  it, does not count, because a detector needs that long to notice some conditions.
* A step must take at least a tenth longer, the limit for stragglers as well (`SHARE_MIN`), and the two groups must be separate:
  of those before, and of those after, all but one lie on their side of the middle. So a pause is no cost. The cost is unknown
  if the job's steps vary, or if the effect of the condition is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from holdfast.domain.evolve import evolve

BUCKET_S = 120.0
SAMPLES_MAX = 15  # of one bucket, spread over it
BUCKETS_MAX = 30
LAG_S = 300.0  # a port counts as down after 240 s without a link
FROM_BUCKETS = (5, 10)  # before the condition: at least, at most
SINCE_BUCKETS = 4
SHARE_MIN = 0.1
SURE_MAX = 0.5


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Step times of the running generation, in seconds."""

    generation: int = 0
    began_at: float = 0.0  # of the newest bucket, Unix seconds
    samples: tuple[float, ...] = ()  # of the newest bucket
    medians: tuple[float, ...] = ()  # of the buckets before it, oldest first; 0 = no step was finished


@dataclass(frozen=True, slots=True)
class Cost:
    share: float | None  # of the job's rate; None = not known
    why: str  # one clause


def recorded(known: StepTimes, generation: int, at: float, step_s: float) -> StepTimes:
    """`known` with a step time that was reported `at`; the same object if it changes nothing."""
    value = float(f"{step_s:.4g}")
    passed_s = at - known.began_at
    if known.generation != generation or passed_s < 0:
        return StepTimes(generation, at, (value,))
    if passed_s < BUCKET_S:
        due_s = len(known.samples) * BUCKET_S / SAMPLES_MAX
        return evolve(known, samples=(*known.samples, value)) if passed_s >= due_s else known
    passed = int(passed_s // BUCKET_S)
    empty = (0.0,) * min(passed - 1, BUCKETS_MAX)
    medians = (*known.medians, median(known.samples), *empty)[-BUCKETS_MAX:]
    return StepTimes(generation, known.began_at + passed * BUCKET_S, (value,), medians)


def cost(known: StepTimes, began_at: float, reported_at: float) -> Cost:
    """The cost of a condition that began at `began_at` or earlier, and was first reported at `reported_at`."""
    before = _between(known, 0.0, min(began_at, reported_at) - LAG_S)[-FROM_BUCKETS[1] :]
    since = _between(known, reported_at, known.began_at)
    if len(before) < FROM_BUCKETS[0]:
        return Cost(None, "too few steps of this generation are known from before it")
    if len(since) < SINCE_BUCKETS:
        return Cost(None, "too few steps are known since it was reported")
    usual_s, now_s = median(before), median(since)
    times = (
        f"a step took {usual_s:.3g} s in the {len(before) * BUCKET_S / 60:.0f} min before it, and {now_s:.3g} s since"
    )
    share = 1.0 - usual_s / now_s
    if share < SHARE_MIN:
        return Cost(None, f"{times}: less than {SHARE_MIN:.0%} of the rate is lost, if any")
    middle_s = (usual_s + now_s) / 2
    if sum(each >= middle_s for each in before) > 1 or sum(each <= middle_s for each in since) > 1:
        return Cost(None, f"{times}, but step times varied as much without it")
    return Cost(share, times)


def _between(known: StepTimes, start: float, end: float) -> Sequence[float]:
    """Medians of the buckets that lie completely within this time."""
    first_at = known.began_at - len(known.medians) * BUCKET_S
    starts = (first_at + index * BUCKET_S for index in range(len(known.medians)))
    return [
        value
        for began_at, value in zip(starts, known.medians, strict=True)
        if value > 0 and began_at >= start and began_at + BUCKET_S <= end
    ]
