"""Connections to peers that stay open between two copies, so that a save of small shards does not cost a handshake for each of
them.

    greeting {nonce}                ◄──
    put {…, keep: true}             ──►   signed for `nonce`
    receipt {ok, durable, next}     ◄──   `next`: the nonce for the next request; without it, the connection ends
    put {…}                         ──►   signed for `next`,   within `IDLE_S`, if both ends would still admit each other

Each request of a connection is signed for a nonce of its own, as the first one is. The client uses a connection for at most
`LIFE_S`, and one that has failed only after a new one was tried (`Client.push`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from holdfast.domain.generations import ShardSource
from holdfast.replicator.transport.line import Line
from holdfast.runtime.processes.readable import readable

IDLE_S = 10.0  # of a client's connection
SERVER_IDLE_S = 15.0  # longer, so that the client closes first
LIFE_S = 300.0
LINES_MAX = 16  # of a client, to all peers
SERVED_MAX = 32  # of a server: a quarter of the default of HOLDFAST_REPLICATOR_CONNECTIONS_MAX


@dataclass(frozen=True, slots=True)
class _Idle:
    line: Line
    since: float


class KeptLines:
    """The idle connections of a client. Thread-safe. `clock`: monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[_Idle] = []  # the longest idle first

    def take(self, peer: ShardSource, lines_max: int) -> list[Line]:
        """Return at most `lines_max` connections to this peer, which nobody else uses until they are put back."""
        found: list[Line] = []
        with self._lock:
            self._close_old()
            for each in self._idle[::-1]:
                if each.line.peer == peer and len(found) < lines_max:
                    found.append(each.line)
                    self._idle.remove(each)
        for line in [line for line in found if readable(line.sock, 0)]:  # the peer has closed it
            found.remove(line)
            line.close()
        return found

    def put(self, line: Line) -> None:
        """Keep a connection. The one that has been idle for longest is closed if there are too many."""
        with self._lock:
            self._idle.append(_Idle(line, self._clock()))
            self._close_old()
            while len(self._idle) > LINES_MAX:
                self._idle.pop(0).line.close()

    def close(self) -> None:
        with self._lock:
            while self._idle:
                self._idle.pop().line.close()

    def _close_old(self) -> None:
        now = self._clock()
        old = [each for each in self._idle if now - each.since > IDLE_S or now - each.line.began > LIFE_S]
        for each in old:
            self._idle.remove(each)
            each.line.close()


class Served:
    """Limits how many connections of a server wait for another request. Thread-safe."""

    def __init__(self, served_max: int = SERVED_MAX) -> None:
        self._free = threading.Semaphore(served_max)

    @contextmanager
    def place(self, *, wanted: bool) -> Iterator[bool]:
        """Occupy a place for the duration of the block if it is wanted; yields whether there was one."""
        kept = wanted and self._free.acquire(blocking=False)
        try:
            yield kept
        finally:
            if kept:
                self._free.release()
