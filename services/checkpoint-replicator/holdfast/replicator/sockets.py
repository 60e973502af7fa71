"""Every open data connection of this process, so that stopping does not wait for a peer; and of one transfer, likewise."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

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
                _shut(sock)


class Abort:
    """Lets whoever waits for a transfer end it: its connections are closed, and it can make no new one. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._aborted = False

    @contextmanager
    def watching(self, sock: socket.socket) -> Iterator[None]:
        with self._lock:
            if self._aborted:
                raise Unavailable("nobody waits for this transfer any more")
            self._open.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(sock)

    def __call__(self) -> None:
        with self._lock:
            self._aborted = True
            for sock in self._open:
                _shut(sock)


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):  # the peer was faster
        sock.shutdown(socket.SHUT_RDWR)
