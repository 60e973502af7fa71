"""What the ranks of a generation report of their steps, as columns that fill up until the step is finished.

The hot path of `stragglers`: every node, every step. Reports go to their place at once, so that judging a step finds a whole
table. 32-bit floats: what is compared are ratios, and 100,000 ranks go through a cache and not through the memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.peers import Floats
from holdfast.domain.signals import StepColumns

_OPEN_MAX = 8  # steps that wait to be complete; ranks are never this far apart
_HUGE = 1e30  # nothing that is true is larger, and nothing that a float holds is lost in 32 bits
_WAIT, _DATA, _TOKENS, _DURATION = range(4)


@dataclass(frozen=True, slots=True)
class Reports:
    """One step: a value per rank in each column, NaN where nothing was reported."""

    columns: Floats

    @property
    def wait_s(self) -> Floats:
        """Time waited for others; NaN = not measured."""
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
        """Take ranks that were not heard to be like the others: telemetry may be dropped. False: too large a share of them."""
        if not math.isnan(self.duration_s.min()):
            return True
        unheard = np.isnan(self.duration_s)
        if np.count_nonzero(unheard) > missing_max * unheard.size:
            return False
        self.columns[:, unheard] = np.median(self.columns[:, ~unheard], axis=1, keepdims=True)
        return True


@dataclass(slots=True)
class StepReports:
    """Of a generation with `ranks` ranks. Telemetry of a step that nobody came to read is dropped, the oldest first."""

    ranks: int
    open: Bounded[int, Floats] = field(
        default_factory=lambda: Bounded(_OPEN_MAX)
    )  # step → what its ranks have reported
    closed: int = 0  # newest step that was read

    def collect(self, item: StepColumns) -> None:
        """One node's finished steps. Ranks that the generation does not have are passed over."""
        if not item.step:
            return
        wait = item.comm_wait_s or (math.nan,) * len(item.rank)
        rows = np.array((wait, item.data_s, item.tokens, item.ended_at), np.float64)
        rows[_DURATION] -= item.started_at
        rows.clip(-_HUGE, _HUGE, out=rows)
        ranks = np.array(item.rank)
        for step in set(item.step):
            if step <= self.closed:
                continue  # it came after its step was judged
            columns = self.open.get_or_add(step, self._unheard)
            here = ranks < self.ranks
            if len(item.step) > 1:
                here &= np.array(item.step) == step
            columns[:, ranks[here]] = rows[:, here]

    def close(self, step: int) -> Reports:
        """What was reported of `step`; nothing more is taken of it and of those before it."""
        columns = self.open.get(step)
        self.closed = max(step, self.closed)
        for old in [old for old in self.open if old <= self.closed]:
            del self.open[old]
        return Reports(self._unheard() if columns is None else columns)

    def _unheard(self) -> Floats:
        return np.full((4, self.ranks), math.nan, np.float32)
