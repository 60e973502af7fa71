"""Many short series with common times, in one array, because a fleet of 100,000 GPUs has a million of them. Pure.

There is one row per kept reading and one column per subject. Readings closer together than `every_s` are not kept. A gap longer
than the window, or a clock that was set back, restarts all columns. A counter that decreases was reset by its driver; its
column restarts with the next row. For an unknown (negative) value the previous value is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Trends:
    """At most `points` rows, about one every `every_s`. A column is judged when it spans `span_s`."""

    columns: int
    points: int
    every_s: float
    window_s: float
    span_s: float
    rows: int = 0
    at: Floats = field(init=False)
    values: Floats = field(init=False)
    starts: NDArray[np.int64] = field(init=False)  # first valid row of each column
    restart: NDArray[np.bool_] = field(init=False)  # columns that restart with the next row

    def __post_init__(self) -> None:
        self.at = np.zeros(self.points)
        self.values = np.zeros((self.points, self.columns))
        self._forget()

    def add(self, at: float, reading: Sequence[float], *, counters: bool) -> bool:
        """Add a reading. Returns False if it is not kept. `counters`: the values never decrease, unlike levels."""
        now = np.asarray(reading, np.float64)
        if self.rows:
            gap_s = at - float(self.at[self.rows - 1])
            if not 0.0 <= gap_s <= self.window_s:
                self._forget()
            elif counters:
                self.restart |= (now >= 0.0) & (now < self.values[self.rows - 1])
            if self.rows and gap_s < self.every_s:
                return False
        self._append(at, now)
        return True

    def _append(self, at: float, now: Floats) -> None:
        if self.rows == self.points:
            self.at[:-1] = self.at[1:]
            self.values[:-1] = self.values[1:]
            np.maximum(self.starts - 1, 0, out=self.starts)
            self.rows -= 1
        unknown = now < 0.0
        self.starts[self.restart] = self.rows
        self.values[self.rows] = now
        if unknown.any():
            known_before = unknown & (self.starts < self.rows)
            self.values[self.rows, known_before] = self.values[self.rows - 1, known_before]
        self.at[self.rows] = at
        self.rows += 1
        self.restart = unknown & ~(self.starts < self.rows - 1)  # unknown so far: begins with a known value

    def _forget(self) -> None:
        self.rows = 0
        self.starts = np.zeros(self.columns, np.int64)
        self.restart = np.ones(self.columns, np.bool_)

    # ---------------------------------------------------------------- results

    @property
    def young(self) -> bool:
        """Whether no column can span enough time yet."""
        return self.rows < 3 or float(self.at[self.rows - 1] - self.at[0]) < self.span_s

    @property
    def judged(self) -> NDArray[np.bool_]:
        """Columns of at least three rows that span enough time. Only their rates are meaningful."""
        return (self.rows - self.starts > 2) & (self.span >= self.span_s)

    @property
    def span(self) -> Floats:
        """Seconds from each column's first row to the last."""
        return np.asarray(self.at[self.rows - 1] - self.at[self.starts])

    @property
    def first(self) -> Floats:
        return np.asarray(self.values[self.starts, np.arange(self.columns)])

    @property
    def last(self) -> Floats:
        return np.asarray(self.values[self.rows - 1])

    @property
    def rate(self) -> Floats:
        """Growth per second from the first row to the last; 0 for a single row."""
        return np.asarray((self.last - self.first) / np.maximum(self.span, 1e-9))

    @property
    def share_growing(self) -> Floats:
        """The share of readings that are larger than the previous reading."""
        larger = np.diff(self.values[: self.rows], axis=0) > 0.0
        counted = np.arange(self.rows - 1)[:, None] >= self.starts
        return np.asarray((larger & counted).sum(axis=0) / np.maximum(self.rows - 1 - self.starts, 1))

    def slope(self, column: int) -> float:
        """Growth per second by least squares, on which a single file that is written and removed has little effect."""
        start = int(self.starts[column])
        times, values = self.at[start : self.rows], self.values[start : self.rows, column]
        times = times - times.mean()
        return float((times * (values - values.mean())).sum() / np.square(times).sum())
