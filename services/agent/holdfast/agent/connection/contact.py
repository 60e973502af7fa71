"""How long diagnostics has not acknowledged telemetry. Pure, apart from the clock.

Without acknowledgements the node's ranks are not watched: hangs, slow ranks and GPU faults of this node are not found, although
its control session stands and its orders are carried out. The agent tells the supervisor in its heartbeats."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

# A stream that ends is opened again within a second, and its first tick requests an acknowledgement.
GAP_S: Final = 5.0
# An open stream is acknowledged every 8 s at least (`outbox.ACK_EVERY`). It may be open and not served.
LATE_S: Final = 20.0


class Contact:
    """When diagnostics last acknowledged a tick."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answered: float | None = None  # None = no endpoint of diagnostics is known
        self._stands = False  # whether the present stream has been acknowledged

    def expected(self) -> None:
        """Endpoints of diagnostics are known: from now on, an acknowledgement is due."""
        if self._answered is None:
            self._answered = self._clock()

    def answered(self) -> None:
        self._answered, self._stands = self._clock(), True

    def ended(self) -> None:
        """The stream has ended."""
        self._stands = False

    def cut_s(self) -> float:
        """Seconds without an acknowledgement, if there should have been one; otherwise 0."""
        if self._answered is None:
            return 0.0
        silent_s = self._clock() - self._answered
        return silent_s if silent_s > (LATE_S if self._stands else GAP_S) else 0.0
