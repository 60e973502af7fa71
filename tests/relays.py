"""Somebody in the middle of a connection, who sees or changes what passes."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

PIECE_BYTES = 1 << 16


@contextmanager
def relayed(endpoint: str, passing: Callable[[bytes], bytes]) -> Iterator[str]:
    """The address of a relay to `endpoint` (host:port). `passing` returns what is passed on in place of each piece, in both
    directions. One connection at a time."""
    host, _, port = endpoint.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                sink.sendall(passing(data))
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                inner, _ = listener.accept()
                with inner, socket.create_connection((host, int(port))) as outer:
                    up = threading.Thread(target=pump, args=(inner, outer))
                    up.start()
                    pump(outer, inner)
                    up.join()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()
