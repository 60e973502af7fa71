"""Open data connections that another thread may close: all of this process, or those of one transfer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from holdfast.domain.errors import Unavailable


class OpenSockets:
    """Thread-safe. After `close_all` no connection is taken in any more; `closed` says why in the error."""

    def __init__(self, closed: str = "this replicator is stopping") -> None:
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._reason = closed
        self._closed = False

    @contextmanager
    def tracking(self, sock: socket.socket) -> Iterator[None]:
        """For as long as the block lasts, `sock` is one of them. Raises Unavailable when they have been closed."""
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
        """Wake every thread that waits on a connection: its read or write ends at once."""
        with self._lock:
            self._closed = True
            for sock in self._open:
                with suppress(OSError):  # the peer was faster
                    sock.shutdown(socket.SHUT_RDWR)


def of_one_transfer() -> OpenSockets:
    """The connections of a transfer that whoever waits for it may give up."""
    return OpenSockets("this transfer was cancelled")
