"""A TCP relay in front of one server that passes on so many bytes per second in each direction, or damages them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

CHUNK_BYTES = 4096
BUFFER_BYTES = 1 << 16  # of its sockets: what waits in them must not look like speed


class SlowRelay:
    """On a free port of the loopback. `bytes_per_s` and `damages` may be set from any thread; 0 = nothing passes."""

    def __init__(self, upstream: str, bytes_per_s: float) -> None:
        host, _, port = upstream.rpartition(":")
        self._upstream = (host, int(port))
        self.bytes_per_s = bytes_per_s
        self.damages = False
        self.passed = 0  # bytes
        self._ended = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with self._lock:
            self._ended = True
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _keep(self, new: socket.socket) -> None:
        """Until the relay is closed; one that came while it was is closed at once."""
        with self._lock:
            if self._ended:
                new.close()
            else:
                self._open.append(new)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._keep(client)
                server = socket.create_connection(self._upstream)
                self._keep(server)
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(CHUNK_BYTES):
                while not (speed := self.bytes_per_s):
                    if self._ended:
                        return
                    time.sleep(0.01)
                if self.damages and len(chunk) > 1024:
                    chunk = chunk[:-1] + bytes([chunk[-1] ^ 1])
                time.sleep(len(chunk) / speed if speed < 1e9 else 0.0)
                target.sendall(chunk)
                self.passed += len(chunk)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def slow_relay(upstream: str, bytes_per_s: float) -> Iterator[SlowRelay]:
    relay = SlowRelay(upstream, bytes_per_s)
    try:
        yield relay
    finally:
        relay.close()
