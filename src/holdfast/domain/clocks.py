"""How far the clock of another process is ahead of the own one, from its dated messages. Pure.

Times of two machines must not be compared as they are: without a time service their clocks may differ by hours, for good. Each
message tells the difference of the two clocks less its own delay. A delay only makes the other clock look late, so the largest
difference among the recent messages counts.

Differences up to `TOLERATED_S` are not corrected: a time service keeps clocks closer than delays can be told. What is corrected
stays the same until it is wrong by more than that, so that the intervals between corrected times are exact. A clock that is set
ahead is recognised by the next message, one that is set back after `RECENT` to twice as many messages.
"""

from __future__ import annotations

import math

TOLERATED_S = 2.0
RECENT = 32  # messages


class OtherClock:
    """`ahead_s`: what times of the other clock are ahead by; 0.0 = nothing that needs a correction, or nothing is known."""

    __slots__ = ("_before_s", "_count", "_largest_s", "ahead_s")

    def __init__(self) -> None:
        self.ahead_s = 0.0
        self._largest_s = self._before_s = -math.inf  # among the last messages, and among the `RECENT` before them
        self._count = 0

    def saw(self, at: float, now: float) -> None:
        """Fold a message that was sent `at` by the other clock, and received `now` by the own one."""
        if not math.isfinite(at):
            return
        if self._count >= RECENT:
            self._before_s, self._largest_s, self._count = self._largest_s, -math.inf, 0
        self._count += 1
        self._largest_s = max(self._largest_s, at - now)
        ahead_s = max(self._largest_s, self._before_s)
        if abs(ahead_s - self.ahead_s) > TOLERATED_S:
            self.ahead_s = ahead_s if abs(ahead_s) > TOLERATED_S else 0.0

    def ours(self, at: float) -> float:
        """Return the own clock's time for a time of the other one."""
        return at - self.ahead_s


def in_words(ahead_s: float) -> str:
    """`3601.0` → `1 h 0 min ahead of`."""
    minutes, seconds = divmod(round(abs(ahead_s)), 60)
    hours, minutes = divmod(minutes, 60)
    length = f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    return f"{length} {'ahead of' if ahead_s > 0 else 'behind'}"
