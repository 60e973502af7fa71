"""A TCP relay between one client and one server, which can stall each direction, or reset existing and new connections.

It runs in a separate thread and needs no privileges. (`network` controls the complete network of the nodes.)
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
from enum import Enum

CHUNK_BYTES = 1 << 16
CONNECT_TIMEOUT_S = 2.0
LINGER_RESET = struct.pack("ii", 1, 0)
POLL_S = 0.05


class Mode(Enum):
    OPEN = "passes on"
    STALL_TO_SERVER = "passes nothing on to the server"
    STALL_TO_CLIENT = "passes nothing on to the client"
    STALL = "passes nothing on"
    RESET = "resets connections"


class Relay:
    """Listens on a free port of the loopback. `mode` may be set from any thread."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.upstream = upstream
        self.mode = Mode.OPEN
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        # socket → (the other side, whether that is the client)
        self._other: dict[socket.socket, tuple[socket.socket, bool]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"relay-{self.port}", daemon=True)
        self._thread.start()

    @property
    def connections(self) -> int:
        return len(self._other) // 2

    def close(self) -> None:
        self._ended.set()
        self._thread.join(5)

    def _run(self) -> None:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        while not self._ended.is_set():
            if self.mode is Mode.RESET:
                self._drop_all()
            stalled = False
            for key, _ in self._selector.select(POLL_S):
                source = key.fileobj
                assert isinstance(source, socket.socket)
                if source is self._listener:
                    self._accept()
                elif source in self._other:
                    stalled |= not self._pass_on(source)
            if stalled:
                self._ended.wait(POLL_S)  # the sockets stay readable; avoids a busy loop
        self._drop_all()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        if self.mode is Mode.RESET:
            _reset(client)
            return
        try:
            server = socket.create_connection(self.upstream, CONNECT_TIMEOUT_S)
        except OSError:
            _reset(client)
            return
        for one, other, is_client in ((client, server, True), (server, client, False)):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.settimeout(CONNECT_TIMEOUT_S)
            self._other[one] = (other, is_client)
            self._selector.register(one, selectors.EVENT_READ)

    def _pass_on(self, source: socket.socket) -> bool:
        """Pass on data. Returns False if the mode forbids it now."""
        target, is_client = self._other[source]
        held = (Mode.STALL, Mode.STALL_TO_SERVER if is_client else Mode.STALL_TO_CLIENT)
        if self.mode in held:
            return False
        try:
            read = source.recv(CHUNK_BYTES)
            if read:
                target.sendall(read)
                return True
        except OSError:
            pass  # one side has closed, so close the other
        self._drop(source)
        return True

    def _drop(self, one: socket.socket) -> None:
        other, _ = self._other.pop(one)
        self._other.pop(other, None)
        for each in (one, other):
            self._selector.unregister(each)
            _reset(each)

    def _drop_all(self) -> None:
        while self._other:
            self._drop(next(iter(self._other)))


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_RESET)
    connection.close()
