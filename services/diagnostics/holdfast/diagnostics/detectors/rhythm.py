"""The rhythm of a job: the duration of its steps, and the steps after which it pauses. Pure; kept across the job's generations.

An interval beyond the allowance that ended by itself is a *pause*, such as an evaluation or a save to a remote store. A pause
is not part of the rhythm, but its position is kept: a job that pauses after step 100 probably pauses again after step 200.
Three such intervals in a row are not pauses; the job has become slower, and its rhythm changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations

HISTORY = 200  # steps
HISTORY_MIN = 3  # steps; the rhythm is not known from fewer
_PAUSES_MAX = 32  # the newest
_SLOWER_AFTER = 3  # intervals in a row


@dataclass(slots=True)
class Rhythm:
    """`intervals_s`: durations of the newest steps, without pauses."""

    intervals_s: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))
    # (after step, seconds)
    _pauses: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_PAUSES_MAX))
    _in_a_row: list[float] = field(default_factory=list)

    @property
    def known(self) -> bool:
        return len(self.intervals_s) >= HISTORY_MIN

    @property
    def slow_s(self) -> float:
        """Duration of a slow step: the 99th percentile; 0.0 without steps."""
        return p99(self.intervals_s)

    def learn(self, step: int, duration_s: float, allowance_s: float) -> None:
        """Record that `step` was finished `duration_s` after the previous step, with an allowance of `allowance_s`."""
        if not self.known or duration_s <= allowance_s:
            self.intervals_s.append(duration_s)
            self._in_a_row.clear()
            return
        self._pauses.append((step - 1, duration_s))
        self._in_a_row.append(duration_s)
        if len(self._in_a_row) >= _SLOWER_AFTER:
            self.intervals_s.extend(self._in_a_row)
            self._in_a_row.clear()

    def pause_s(self, step: int) -> float:
        """The longest known pause at the position of `step`; 0.0 if there is none.

        Positions repeat at multiples of a step with a pause, and at the distance between two steps with pauses.
        """
        at_multiples = (duration_s for after, duration_s in self._pauses if after > 0 and step % after == 0)
        return max([*at_multiples, *self._apart(step)], default=0.0)

    def _apart(self, step: int) -> Iterable[float]:
        for (first, first_s), (second, second_s) in combinations(self._pauses, 2):
            period = abs(second - first)
            if period > 1 and (step - first) % period == 0:
                yield max(first_s, second_s)


def p99(values: deque[float]) -> float:
    """The 99th percentile (nearest rank); 0.0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0
