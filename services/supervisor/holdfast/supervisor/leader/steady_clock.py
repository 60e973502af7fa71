"""The time that a leader's events carry: it passes as time passes, whatever is done to the machine's clock.

A wall clock can be set: an hour back, and every timer would wait that hour; an hour ahead, and all of them would fire at once,
before any agent could have answered. So a term reads it when it begins, goes on by a clock that nobody sets, and draws
near to the wall clock again by at most `DRIFT_MAX` of the time that passes: an hour is made good within a day, and until
then what users are shown is off by what is left of it, while every interval is right to 5 %.
"""

from __future__ import annotations

import time
from collections.abc import Callable

DRIFT_MAX = 0.05


class SteadyClock:
    """Call it for the time in Unix seconds."""

    def __init__(self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = time.monotonic) -> None:
        """`wall`: Unix seconds; `elapsed`: seconds since any moment, never set."""
        self._wall, self._elapsed = wall, elapsed
        self._read_at = elapsed()
        self._offset = wall() - self._read_at

    def __call__(self) -> float:
        elapsed = self._elapsed()
        drift_s = (elapsed - self._read_at) * DRIFT_MAX
        wanted = self._wall() - elapsed
        self._offset = min(max(wanted, self._offset - drift_s), self._offset + drift_s)
        self._read_at = elapsed
        return elapsed + self._offset

    def not_before(self, at: float) -> None:
        """It is at least this late: a leader whose clock was ahead has written so, and its timers count from there."""
        self._offset = max(self._offset, at - self._read_at)
