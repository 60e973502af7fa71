"""Time limits for retries after failures of a store."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from holdfast.domain.errors import Unavailable

FIRST_S = 0.1
DELAY_S_MAX = 8.0


class Transient(Exception):
    """A transient failure: 429, 5xx, a timeout, a broken stream. Never leaves this package."""

    def __init__(self, why: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s


class Patience:
    """Retries of one operation: waits between attempts, with exponential back-off and jitter, until `deadline_s` of failures.

    The time is counted from the first failure, because the duration of a transfer is not limited. `progressed` resets it,
    because a transfer with occasional failures still advances.
    """

    def __init__(
        self,
        deadline_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        chance: random.Random | None = None,
    ) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._sleep = sleep
        self._chance = chance or random.Random()
        self._failing_since: float | None = None
        self._ceiling_s = FIRST_S

    def progressed(self) -> None:
        self._failing_since = None
        self._ceiling_s = FIRST_S

    def failed(self, error: Transient, what: str) -> None:
        """Wait for the next attempt. Raises Unavailable if that would exceed the deadline."""
        delay_s = max(self._chance.uniform(self._ceiling_s / 2, self._ceiling_s), error.retry_after_s)
        self._ceiling_s = min(self._ceiling_s * 2, DELAY_S_MAX)
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        failing_s = now - self._failing_since
        if failing_s + delay_s > self._deadline_s:
            raise Unavailable(f"{what} failed for {failing_s:.1f} s; the last error: {error}")
        self._sleep(delay_s)
