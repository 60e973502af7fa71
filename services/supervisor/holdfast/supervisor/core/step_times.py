"""What a warning costs its job, by the time that the job's steps take before it and since. Pure.

A port, a disk or a counter that gets worse says nothing of what that costs. The job does: if its steps take longer since, and
nothing else was found at that time, the condition is the best explanation. It is no proof, because a job may become slower by
itself at that moment, so what is measured like this is believed half (`SURE_MAX`), and only where it is plain:

    steps    ────────────────────────┐                     ┌──── now
             before (`FROM_BUCKETS`)  │ began, was reported │ since (`SINCE_BUCKETS`)

* Step times are kept as medians of two minutes each, for an hour of one generation: another one has other nodes.
* Enough of them lie before the condition began and since it was first reported. In between, and `LAG_S` before, nothing counts:
  a detector needs that long to see some conditions.
* A step takes a tenth longer at least, which is what stragglers are judged by as well (`SHARE_MIN`), and the two times are
  apart: of those before, and of those since, all but one are on their side of the middle. So a pause is no cost, a job whose
  steps vary has none that is known, and neither has a condition whose effect is over.
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
    """Of the running generation, seconds."""

    generation: int = 0
    began_at: float = 0.0  # of the newest bucket, Unix seconds
    samples: tuple[float, ...] = ()  # of the newest bucket
    medians: tuple[float, ...] = ()  # of the buckets before it, oldest first; 0 = no step was finished


@dataclass(frozen=True, slots=True)
class Cost:
    share: float | None  # of the job's rate; None = not known
    why: str  # one clause


def recorded(known: StepTimes, generation: int, at: float, step_s: float) -> StepTimes:
    """With a step time that was reported `at`; the same object where it changes nothing."""
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
    """What a condition costs that began then, at the latest, and was first reported at `reported_at`."""
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
    """Medians of the buckets that lie in this time whole."""
    first_at = known.began_at - len(known.medians) * BUCKET_S
    starts = (first_at + index * BUCKET_S for index in range(len(known.medians)))
    return [
        value
        for began_at, value in zip(starts, known.medians, strict=True)
        if value > 0 and began_at >= start and began_at + BUCKET_S <= end
    ]
