"""Waits for rank 0's store. torch's own client sleeps for half a second after a refused connection (measured with 2.13), which
is as long as the rest of a recovery. So the other ranks poll the port every few milliseconds and connect when it listens."""

from __future__ import annotations

import socket
import time
from typing import Final

POLL_S: Final = 0.003
CONNECT_TIMEOUT_S: Final = 5.0


def wait_until_served(host: str, port: int, timeout_s: float) -> None:
    """Wait until the port accepts connections or the deadline has passed. torch's store then reports the endpoint in
    its error."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=min(CONNECT_TIMEOUT_S, timeout_s)).close()
        except OSError:  # reserved by rank 0's agent, not listening yet
            time.sleep(POLL_S)
        else:
            return
