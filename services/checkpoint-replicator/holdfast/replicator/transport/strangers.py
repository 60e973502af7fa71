"""What peers may occupy of a replicator before a signature has shown that they belong to a job: connections and memory."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.domain.errors import Unavailable

CONNECTIONS_MAX = 64  # per address; half of the default of HOLDFAST_REPLICATOR_CONNECTIONS_MAX
REQUEST_BYTES_MAX = 64 << 20  # of all requests that are too large for a header; four of the largest manifests


class Strangers:
    """Limits for peers that are not known yet. Thread-safe."""

    def __init__(self, connections_max: int = CONNECTIONS_MAX, bytes_max: int = REQUEST_BYTES_MAX) -> None:
        """`connections_max`: of one address at a time. `bytes_max`: of large requests of all addresses at a time."""
        self._lock = threading.Lock()
        self._connections_max = connections_max
        self._bytes_left = bytes_max
        self._connections: Counter[str] = Counter()

    @contextmanager
    def connection(self, address: str) -> Iterator[None]:
        """Count a connection until its peer is known. Raises Unavailable if the address has too many of them."""
        with self._lock:
            if self._connections[address] >= self._connections_max:
                raise Unavailable(f"{address} has {self._connections_max} connections that have not shown a token")
            self._connections[address] += 1
        try:
            yield
        finally:
            with self._lock:
                self._connections[address] -= 1
                if not self._connections[address]:
                    del self._connections[address]

    @contextmanager
    def memory(self, size: int) -> Iterator[None]:
        """Reserve the memory of a large request until its signature is checked. Raises Unavailable if too much is reserved."""
        with self._lock:
            if size > self._bytes_left:
                raise Unavailable(f"requests that have not shown a token leave no memory for one of {size} bytes")
            self._bytes_left -= size
        try:
            yield
        finally:
            with self._lock:
                self._bytes_left += size
