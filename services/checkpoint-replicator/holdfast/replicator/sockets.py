"""Open data connections that another thread can close: all those of this process, or of one transfer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast.domain.errors import Unavailable


class OpenSockets:
    """A set of connections. Thread-safe. After `close_all`, new connections are refused with `closed` as the reason."""

    def __init__(self, closed: str = "this replicator is stopping") -> None:
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._reason = closed
        self._closed = False

    @contextmanager
    def tracking(self, sock: socket.socket) -> Iterator[None]:
        """Add `sock` for the duration of the block. Raises Unavailable after `close_all`."""
        with self._lock:
            if self._closed:
                raise Unavailable(self._reason)
            self._open.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(sock)

    @property
    def closed(self) -> bool:
        return self._closed

    def close_all(self) -> None:
        """Shut down all connections. Threads that wait for a read or write return immediately."""
        with self._lock:
            self._closed = True
            for sock in self._open:
                with suppress(OSError):  # the peer has closed the connection
                    # Not `sock.shutdown`: that of TLS switches the encryption off first, and another thread may be sending.
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)


def of_one_transfer() -> OpenSockets:
    """Return the connections of one transfer, which its caller can cancel."""
    return OpenSockets("this transfer was cancelled")
