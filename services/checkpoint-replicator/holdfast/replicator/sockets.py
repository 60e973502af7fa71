"""Every open data connection of this process, so that stopping does not wait for a peer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.domain.errors import Unavailable


class OpenSockets:
    """Thread-safe. After `close_all` no connection is taken in any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False

    @contextmanager
    def tracking(self, sock: socket.socket) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise Unavailable("this replicator is stopping")
            self._open.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(sock)

    def close_all(self) -> None:
        """Wake every thread that waits on a connection: its read or write ends at once."""
        with self._lock:
            self._closed = True
            for sock in self._open:
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:  # the peer was faster
                    continue
