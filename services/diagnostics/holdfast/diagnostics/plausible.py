"""Rejects signals that can be decoded but cannot be true: ranks outside the mesh, impossible times, excessive counts. Pure.

A rejected signal is counted by kind and reason, and the rest of its tick is folded. A worker that reports impossible values
therefore does not make its node look dead, and detectors need not expect such values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from operator import gt

from holdfast.diagnostics.bounded import Bounded
from holdfast.domain.signals import GenerationStarted, NodeSignal, ObservedSteps, RankProgress, StepColumns

COUNT_MAX = 1 << 53  # steps, tokens: the integers up to this one are exact as floats
TIME_MAX_S = 1e11  # Unix seconds: about the year 5100
_GENERATIONS_MAX = 4096

Key = tuple[str, int]  # (job, generation)


class Plausibility:
    """`rejected` counts the rejected signals by "kind: reason" since the start of the process."""

    def __init__(self) -> None:
        self._world_sizes: Bounded[Key, int] = Bounded(_GENERATIONS_MAX)
        self.rejected: Counter[str] = Counter()

    def screen(self, signals: Iterable[NodeSignal]) -> tuple[tuple[NodeSignal, ...], tuple[str, ...]]:
        """Return the signals that may be true, and the reason for each rejected signal."""
        kept, reasons = list[NodeSignal](), list[str]()
        for signal in signals:
            reason = self._impossible(signal)
            if reason is None:
                kept.append(signal)
            else:
                reasons.append(f"{type(signal).__name__}: {reason}")
        if reasons:
            self.rejected.update(reasons)
        return tuple(kept), tuple(reasons)

    def _impossible(self, signal: NodeSignal) -> str | None:
        match signal:
            case StepColumns():
                return self._of_ranks(signal) or _of_steps(signal)
            case ObservedSteps():
                return self._of_ranks(signal) or _of_observed(signal)
            case RankProgress(observed=observed):
                beyond = "a step number above the maximum" if observed and max(observed) > COUNT_MAX else None
                return self._of_ranks(signal) or beyond
            case GenerationStarted():
                self._world_sizes[(signal.job, signal.generation)] = signal.mesh.world_size
            case _:
                pass
        return None

    def _of_ranks(self, item: StepColumns | ObservedSteps | RankProgress) -> str | None:
        if not item.rank:
            return None
        if max(item.rank) >= self._world_sizes.get((item.job, item.generation), math.inf):
            return "a rank that its generation does not have"
        if max(item.step) > COUNT_MAX:
            return "a step number above the maximum"
        return None


def _of_times(item: StepColumns | ObservedSteps, *durations_s: Sequence[float]) -> str | None:
    """Checks sums instead of values, because every node sends steps each second: one NaN or infinity makes the sum NaN or
    infinite."""
    if not math.isfinite(sum(item.started_at) + sum(item.ended_at) + sum(map(sum, durations_s))):
        return "an impossible time"
    if not 0.0 <= min(item.started_at) <= max(item.ended_at) <= TIME_MAX_S:
        return "an impossible time"
    if any(map(gt, item.started_at, item.ended_at)):
        return "a step that ends before it starts"
    return "a negative duration" if min(map(min, durations_s)) < 0.0 else None


def _of_steps(item: StepColumns) -> str | None:
    """Return the reason to reject `item`, or None."""
    if not item.rank:
        return None
    if problem := _of_times(item, item.data_s, item.stall_s):
        return problem
    if item.flops and not (min(item.flops) >= 0.0 and math.isfinite(sum(item.flops))):
        return "an impossible number of FLOPs"
    return "a token count above the maximum" if max(item.tokens) > COUNT_MAX else None


def _of_observed(item: ObservedSteps) -> str | None:
    if not item.rank:
        return None
    if problem := _of_times(item, item.comm_wait_s):
        return problem
    return "a block without steps" if min(item.steps) < 1 else None
