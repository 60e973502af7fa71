"""SIGTERM as a request that a loop of the main thread checks."""

from __future__ import annotations

import os
import signal
from types import FrameType

from holdfast.runtime.processes.readable import readable


class StopRequest:
    """Set by the signal handler, waited for by the main thread.

    Not a `threading.Event`: a handler runs in the main thread, between any two instructions of `Event.wait`, and would wait for
    the lock that this very thread holds.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def on(self, *numbers: signal.Signals) -> None:
        """Install the handler. Main thread only."""
        for number in numbers:
            signal.signal(number, self._request)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a stop request, for at most `timeout_s`. Returns whether there is one."""
        return readable(self._reader, timeout_s)

    def _request(self, _number: int, _frame: FrameType | None) -> None:
        try:
            os.write(self._writer, b"\0")
        except BlockingIOError:
            pass  # the pipe is full of earlier requests
