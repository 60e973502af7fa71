"""Waits for rank 0's store. torch's own client sleeps for half a second after a refused connection (measured with 2.13), which
is as long as the rest of a recovery. The other ranks therefore poll the port every 3 ms, and connect when it is open."""

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
        except OSError:  # rank 0's agent has reserved the port, and rank 0 does not listen yet
            time.sleep(POLL_S)
        else:
            return
