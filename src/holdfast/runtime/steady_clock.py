"""The clock of a leader's events and of diagnostics' signals. It advances steadily, even if the machine's clock is set.

A wall clock can be set. If it were set back by an hour, every timer would wait for that hour, and so would every conclusion
from silence. If it were set ahead, all timers would fire at once, before any agent could have answered. So a leader's term and
diagnostics read the wall clock when they begin, and continue by a clock that is never set. It approaches the wall clock again
by at most `DRIFT_MAX` of the elapsed time: an hour is corrected within a day. Until then the displayed times are off by the
rest, while every interval is right to 5 %.

The next leader may run on a machine with another wall clock. It continues the time of the last one instead of reading its own
(`resume`): otherwise a machine that is an hour ahead would find that an hour has passed, and all timers would fire.
"""

from __future__ import annotations

import time
from collections.abc import Callable

DRIFT_MAX = 0.05


class SteadyClock:
    """Call it for the time, in Unix seconds."""

    def __init__(self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = time.monotonic) -> None:
        """`wall`: Unix seconds; `elapsed`: seconds since any moment, of a clock that is never set."""
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

    def resume(self, at: float, ago_s: float) -> None:
        """Continue the time of another clock, which showed `at` `ago_s` ago, by the clock of the event log.

        There are two measures of the time that has passed since: `ago_s`, and the difference of the two wall clocks. Either can
        be wrong by any amount, so the smaller one counts. A timer is then late by the length of the pause at most; the larger
        one could make it hours early."""
        by_wall_s = self._wall() - at
        self._read_at = self._elapsed()
        self._offset = at + max(0.0, min(ago_s, by_wall_s)) - self._read_at

    def not_before(self, at: float) -> None:
        """Move the time to `at` or later: an earlier leader wrote that time, and its timers are relative to it."""
        self._offset = max(self._offset, at - self._read_at)
