"""Collects the reports of a generation's ranks about each step, in columns that are filled until the step is finished.

This is the hot path of `stragglers`: it is called for every node and every step. Each value is stored at its final place, so
that the table is complete when the step is judged. 32-bit floats are enough for ratios, and 100,000 of them fit into the cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.comparison import Floats
from holdfast.domain.signals import StepColumns

_OPEN_MAX = 8  # steps that are not complete; ranks are never this far apart
_HUGE = 1e30  # larger than any true value, and within the range of 32 bits
_WAIT, _DATA, _TOKENS, _DURATION = range(4)


@dataclass(frozen=True, slots=True)
class Reports:
    """One step: a value per rank in each column; NaN = not reported."""

    columns: Floats

    @property
    def wait_s(self) -> Floats:
        """Time of waiting for other ranks; NaN = not measured."""
        return np.asarray(self.columns[_WAIT])

    @property
    def data_s(self) -> Floats:
        return np.asarray(self.columns[_DATA])

    @property
    def tokens(self) -> Floats:
        return np.asarray(self.columns[_TOKENS])

    @property
    def duration_s(self) -> Floats:
        return np.asarray(self.columns[_DURATION])

    def fill(self, missing_max: float) -> bool:
        """Fill in the median for ranks without a report, because telemetry may be dropped. Returns False if too many ranks lack
        a report."""
        if not math.isnan(self.duration_s.min()):
            return True
        missing = np.isnan(self.duration_s)
        if np.count_nonzero(missing) > missing_max * missing.size:
            return False
        self.columns[:, missing] = np.median(self.columns[:, ~missing], axis=1, keepdims=True)
        return True


@dataclass(slots=True)
class StepReports:
    """Open steps of a generation with `ranks` ranks. Beyond `_OPEN_MAX`, the step that was opened first is dropped."""

    ranks: int
    open: Bounded[int, Floats] = field(
        default_factory=lambda: Bounded(_OPEN_MAX)
    )  # step → the values that its ranks have reported
    closed: int = 0  # newest step that was returned by `close`

    def collect(self, item: StepColumns) -> None:
        """Store one node's finished steps. Ranks outside of the generation are ignored."""
        if not item.step:
            return
        wait = item.comm_wait_s or (math.nan,) * len(item.rank)
        rows = np.array((wait, item.data_s, item.tokens, item.ended_at), np.float64)
        rows[_DURATION] -= item.started_at
        rows.clip(-_HUGE, _HUGE, out=rows)
        ranks = np.array(item.rank)
        for step in set(item.step):
            if step <= self.closed:
                continue  # late report: the step has been judged
            columns = self.open.get_or_add(step, self._missing)
            here = ranks < self.ranks
            if len(item.step) > 1:
                here &= np.array(item.step) == step
            columns[:, ranks[here]] = rows[:, here]

    def close(self, step: int) -> Reports:
        """Return the reports of `step`. Later reports of this step and of earlier steps are ignored."""
        columns = self.open.get(step)
        self.closed = max(step, self.closed)
        for old in [old for old in self.open if old <= self.closed]:
            del self.open[old]
        return Reports(self._missing() if columns is None else columns)

    def _missing(self) -> Floats:
        return np.full((4, self.ranks), math.nan, np.float32)
