"""Collects the reports of a generation's ranks about each step, in columns that are filled until the step is finished.

This is the hot path of `stragglers`: it is called for every node and every step. Reports wait until there are enough for
operations on columns, whose cost for the few ranks of one report would be that of the calls. Each value is then stored at its
final place. 32-bit floats are enough for ratios, and 100,000 of them fit into the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.comparison import Floats
from holdfast.domain.signals import StepColumns

_WAITING_ROWS_MAX = 1024  # (rank, step) pairs of reports that wait for operations on columns
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
    # step → the values that its ranks have reported
    open: Bounded[int, Floats] = field(default_factory=lambda: Bounded(_OPEN_MAX))
    closed: int = 0  # newest step that was returned by `close`
    _waiting: list[StepColumns] = field(default_factory=list)
    _waiting_rows: int = 0

    def collect(self, item: StepColumns) -> None:
        """Store one node's finished steps. Ranks outside of the generation are ignored."""
        self._waiting.append(item)
        self._waiting_rows += len(item.step)
        if self._waiting_rows > _WAITING_ROWS_MAX:
            self._store()

    def close(self, step: int) -> Reports:
        """Return the reports of `step`. Later reports of this step and of earlier steps are ignored."""
        self._store()
        columns = self.open.get(step)
        self.closed = max(step, self.closed)
        for old in [old for old in self.open if old <= self.closed]:
            del self.open[old]
        return Reports(self._missing() if columns is None else columns)

    def _store(self) -> None:
        """Store the reports that wait, in the order in which they came: the last report of a rank counts."""
        items, count = self._waiting, self._waiting_rows
        self._waiting, self._waiting_rows = [], 0
        if not count:
            return

        def column(of: Callable[[StepColumns], Sequence[Any]], kind: type) -> NDArray[Any]:
            return np.fromiter(chain.from_iterable(map(of, items)), kind, count)

        ranks, steps = column(_rank, np.int64), column(_step, np.int64)
        rows = np.empty((4, count))
        rows[_WAIT], rows[_DATA] = column(_wait, np.float64), column(_data, np.float64)
        rows[_TOKENS] = column(_tokens, np.float64)
        rows[_DURATION] = column(_ended, np.float64) - column(_started, np.float64)
        rows.clip(-_HUGE, _HUGE, out=rows)
        known = ranks < self.ranks
        for step in dict.fromkeys(steps.tolist()):
            if step <= self.closed:
                continue  # late report: the step has been judged
            columns, here = self.open.get_or_add(step, self._missing), known & (steps == step)
            columns[:, ranks[here]] = rows[:, here]

    def _missing(self) -> Floats:
        return np.full((4, self.ranks), math.nan, np.float32)


_rank, _step, _data, _tokens = (attrgetter(name) for name in ("rank", "step", "data_s", "tokens"))
_started, _ended = attrgetter("started_at"), attrgetter("ended_at")


def _wait(item: StepColumns) -> tuple[float, ...]:
    return item.comm_wait_s or (math.nan,) * len(item.rank)
