"""Compares one number per rank and step. Columnar arithmetic only.

Ranks are compared with their *group*, the ranks of the same pipeline stage: they hold the same layers, while stages
legitimately differ. A rank's *excess* in a step is its own work divided by the median of its group without the rank, minus one:
0.2 is 20 % slower. The median excludes the rank because a rank in a group of two or three would otherwise be compared with
itself.

A rank is often slow in a step because of its data, such as long sequences. All stages of a replica work on the same samples, so
the excess of the *other* stages is a measure of the data; without stages, the rank's number of tokens is. The part of the
excess that this covariate explains (one slope per stage, least squares over the window) is subtracted before a rank is judged.
On a real job with sequence imbalance the covariate explains nearly everything.

A rank is an outlier if its mean excess over the window is above both a floor and `z` standard errors. The error is the largest
of the rank's own noise, its stage's usual noise, and the spread of all ranks' means. Ranks that always differ a little
therefore raise the limit for each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from holdfast.diagnostics.thresholds import StragglerThresholds
from holdfast.domain.mesh import DATA_PARALLEL, Mesh

PIPELINE = "pp"
_SPREAD_MIN_RANKS = 8  # fewer ranks have no meaningful spread
SAMPLE = 512  # ranks from which the usual noise is estimated
_MAD_TO_SIGMA = 1.4826

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Grid:
    """A mesh as stages × replicas × members (the other dimensions). `ranks` has this shape and contains rank numbers."""

    ranks: NDArray[np.int64]
    in_order: bool  # the rank numbers are consecutive, so that `lay` needs no copy

    @classmethod
    def of(cls, mesh: Mesh) -> Grid:
        ranks = np.arange(mesh.world_size).reshape([size for _, size in mesh.dims])
        names = [name for name, _ in mesh.dims]
        axes = [names.index(name) for name in (PIPELINE, DATA_PARALLEL) if name in names]
        ranks = np.moveaxis(ranks, axes, range(len(axes)))
        stages = dict(mesh.dims).get(PIPELINE, 1)
        laid = np.ascontiguousarray(ranks.reshape(stages, mesh.dp, -1))
        return cls(laid, in_order=bool((np.diff(laid.ravel()) == 1).all()))

    @property
    def stages(self) -> int:
        return int(self.ranks.shape[0])

    @property
    def group_size(self) -> int:
        """Ranks per stage."""
        return int(self.ranks.shape[1] * self.ranks.shape[2])

    def lay(self, by_rank: Floats) -> Floats:
        """Arrange one value per rank as stages × group. Returns a view of `by_rank` if the ranks are in order."""
        if self.in_order:
            return by_rank.reshape(self.stages, -1)
        return by_rank[self.ranks.reshape(self.stages, -1)]


def median_of_others(work: Floats) -> tuple[Floats, Floats]:
    """Return for each element the median of its row without the element, and for each row the lower median of the whole row.

    Rows need at least two elements; no element may be NaN.
    """
    n = work.shape[1]
    half = n // 2
    if n % 2 == 0:
        low, high = np.partition(work, (half - 1, half), axis=1)[:, half - 1 : half + 1].T[:, :, None]
        return np.asarray(np.where(work <= low, high, low), np.float32), low[:, 0].copy()
    below, middle, above = np.partition(work, (half - 1, half, half + 1), axis=1)[:, half - 1 : half + 2].T[:, :, None]
    upper, lower, without = (middle + above) / 2, (below + middle) / 2, (below + above) / 2
    others = np.where(work < middle, upper, np.where(work > middle, lower, without))
    return np.asarray(others, np.float32), middle[:, 0].copy()


def excess(work: Floats) -> tuple[Floats, Floats]:
    """Return the excess of each rank, which is 0 in a group of one, and the lower median of each stage's work."""
    if work.shape[1] < 2:
        return np.zeros_like(work), work[:, 0].copy()
    over, usual = median_of_others(work)
    np.maximum(over, np.float32(1e-9), out=over)
    np.divide(work, over, out=over)
    over -= np.float32(1.0)
    return over, usual


def data_effect(over: Floats, grid: Grid) -> Floats | None:
    """Return the excess of the other stages of each rank's replica, a measure of its data; None with one stage or replica."""
    if grid.stages < 2 or grid.ranks.shape[1] < 2:
        return None
    replicas = np.median(over.reshape(grid.ranks.shape), axis=2)  # stages × replicas
    if grid.stages == 2:
        others = replicas[::-1]
    else:  # a median: one bad rank in another stage is not the data
        others = np.stack([np.median(np.delete(replicas, stage, axis=0), axis=0) for stage in range(grid.stages)])
    return np.repeat(others, grid.ranks.shape[2], axis=1)


@dataclass(frozen=True, slots=True)
class Outliers:
    """Ranks that may be outliers, one entry each. `raw`: mean excess. `adjusted`: mean excess without the part that the data
    explains. `bar`: the limit of `adjusted`."""

    stage: NDArray[np.intp]
    peer: NDArray[np.intp]
    raw: Floats
    adjusted: Floats
    bar: Floats
    is_slow: NDArray[np.bool_]  # slow whatever its data
    is_loaded: NDArray[np.bool_]  # slow because of its data: not slow after subtracting the effect of the data
    explained: float  # share of all ranks' variation that the data explains


@dataclass(frozen=True, slots=True)
class _Noise:
    """The usual noise of this window."""

    variance: Floats  # variance of one rank over the steps; the median of each stage
    spread: np.float32  # robust sigma of the ranks' means


def outliers(raw: Floats, cause: Floats, mean: Floats, limits: StragglerThresholds) -> Outliers:
    """Judge a window. `raw`: excess, and `cause`: its covariate, both steps × stages × group within ±clip. `mean`: mean of
    `raw` over the steps.

    Only ranks with a mean above a third of the floor are judged, in most windows none. The usual noise is estimated from a
    regular sample of all ranks. So 100,000 ranks cost little more than the computation of their mean.
    """
    stage, peer = np.nonzero(mean > limits.floor / 3)
    some = raw[:, :, :: max(1, raw.shape[2] // SAMPLE)]
    why = cause[:, :, :: max(1, raw.shape[2] // SAMPLE)]
    slope = np.einsum("wsp,wsp->s", some, why) / np.maximum(np.einsum("wsp,wsp->s", why, why), np.float32(1e-6))
    slope = np.clip(slope, 0.0, 2.0)
    left = some - slope[:, None] * why
    explained = 1.0 - float(np.square(left).sum()) / max(float(np.square(some).sum()), 1e-9)
    if not stage.size:
        nothing, nobody = np.empty(0, np.float32), np.empty(0, np.bool_)
        return Outliers(stage, peer, nothing, nothing, nothing, nobody, nobody, explained)
    chosen = raw[:, stage, peer]
    adjusted = chosen - slope[stage] * cause[:, stage, peer]
    is_high, _ = _above(chosen, stage, _usual(some), limits)
    is_slow, bar = _above(adjusted, stage, _usual(left), limits)
    return Outliers(
        stage, peer, chosen.mean(axis=0), adjusted.mean(axis=0), bar, is_slow, is_high & ~is_slow, explained
    )


def _usual(over: Floats) -> _Noise:
    mean = over.mean(axis=0)
    variance = np.median(np.maximum(np.square(over).mean(axis=0) - np.square(mean), 0.0), axis=1)
    spread = np.median(np.abs(mean - np.median(mean))) if mean.size >= _SPREAD_MIN_RANKS else 0.0
    return _Noise(variance, np.float32(_MAD_TO_SIGMA * spread))


def _above(
    over: Floats, stage: NDArray[np.intp], usual: _Noise, limits: StragglerThresholds
) -> tuple[NDArray[np.bool_], Floats]:
    """Return whether each chosen rank (steps × ranks) is above its limit and most of its steps show this, and the limits."""
    steps = over.shape[0]
    variance = np.maximum(over.var(axis=0), usual.variance[stage])
    error = np.maximum(np.sqrt(variance / max(1, steps - 1)), usual.spread)
    bar = np.maximum(np.float32(limits.floor), np.float32(limits.z) * error).astype(np.float32)
    lasting = np.count_nonzero(over > limits.floor / 2, axis=0) >= limits.lasting * steps
    return (over.mean(axis=0) > bar) & lasting, bar


def began(over: Floats) -> int:
    """The index of the first step with a higher excess of one rank: the split that explains the window best."""
    steps = over.shape[0]
    sums = np.concatenate(([0.0], np.cumsum(over, dtype=np.float64)))
    total = sums[-1]
    gains = [
        (total - sums[i]) / (steps - i) - sums[i] / i if i else total / steps  # mean after minus mean before
        for i in range(steps)
    ]
    weights = [np.sqrt((steps - i) * i / steps) if i else np.sqrt(steps) / 2 for i in range(steps)]
    return int(np.argmax(np.asarray(gains) * np.asarray(weights)))
