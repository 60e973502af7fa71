"""Tests of the network between two nodes without ranks, on the way that shards take.

    measuring node                                        other node, whose door is open for this token
    ask {direction: in}            ──►  ok
    PINGS times 8 bytes            ──►  the same 8 bytes       the shortest round trip counts
    reads                          ◄──  blocks                 until `bytes_max` or `seconds_max`, whichever is first
    ask {direction: out}           ──►  ok                     on a second connection
    blocks                         ──►  reads
                                   ◄──  {bytes, seconds, damaged}

The receiver measures, so that bytes in buffers do not count. All blocks contain the same bytes, which are derived from the
token, and each received block is compared with them. A test needs the memory of one block only.

A failure of the network differs from a test that did not finish. The network has failed if the machine cannot be reached, if no
bytes arrive, or if bytes are damaged. A replicator that does not run, refuses, or closes the connection proves nothing about
the network: it may have ended the test because a job needs its node."""

from __future__ import annotations

import errno
import hashlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.domain.errors import Conflict, MalformedMessage, Unavailable
from holdfast.domain.generations import ShardSource
from holdfast.domain.links import LinkLimits, LinkMeasured, MeasureLink, OpenLink
from holdfast.replicator.sockets import OpenSockets
from holdfast.replicator.threads import Threads
from holdfast.replicator.transport import frames
from holdfast.replicator.transport.client import Client
from holdfast.replicator.transport.line import Line

LINK = "link"  # `op` of the requests of a network test
BLOCK_BYTES = 256 << 10
PINGS = 16
PING_BYTES = 8
ANSWER_S = 2.0  # for the other node's answer after the data
BYTES_MAX = 1 << 30  # even if a request contains a larger limit
SECONDS_MAX = 5.0

# The other machine cannot be reached. ECONNREFUSED is not in this set, because it is an answer of the machine.
_UNREACHED = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN})


class LinkDoor:
    """Admits the connections of one test at a time, for a limited time. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OpenLink | None = None
        self._until = 0.0
        self._sockets = OpenSockets()

    def open(self, request: OpenLink) -> None:
        """Admit this test, in place of an earlier one."""
        self.close()
        with self._lock:
            self._open, self._until = request, time.monotonic() + request.for_s
            self._sockets = OpenSockets("the test was ended")

    def close(self) -> None:
        """Admit no test, and end the one in progress."""
        with self._lock:
            self._open = None
            sockets = self._sockets
        sockets.close_all()

    @property
    def token(self) -> str:
        """The token of the expected test; "" if none is expected."""
        with self._lock:
            expected = self._open is not None and time.monotonic() < self._until
            return self._open.token if expected and self._open is not None else ""

    def serve(self, sock: socket.socket, fields: Mapping[str, Any], answer: Callable[..., None]) -> None:
        """Serve one connection of the test. Raises OSError, Unavailable, and MalformedMessage."""
        with self._lock:
            opened, sockets = self._open, self._sockets
        if opened is None:
            raise Unavailable("the test was ended")
        limits, block = _bounded(opened.limits), _block(opened.token)
        with sockets.tracking(sock):
            match fields.get("direction"):
                case "in":
                    answer(ok=True)
                    _echo(sock)
                    _send_blocks(sock, block, limits)
                case "out":
                    answer(ok=True)
                    taken = _receive_blocks(sock, block, limits)
                    frames.block(sock, ANSWER_S)
                    answer(ok=True, bytes=taken.nbytes, seconds=taken.seconds, damaged=taken.damaged)
                    _drain(sock)
                case other:
                    raise MalformedMessage("link test direction", f"{other!r}; in or out is expected")


@dataclass(slots=True)
class Links:
    """Executes the network tests that the agent requests, one at a time."""

    client: Client
    threads: Threads
    door: LinkDoor
    _under_way: bool = field(default=False, init=False)

    async def measure(self, request: MeasureLink) -> LinkMeasured:
        """Raises Conflict if a test is in progress, and Unavailable if this test did not finish."""
        if self._under_way:
            raise Conflict("a test of the network is in progress")
        self._under_way = True
        connections = OpenSockets("the test was ended")
        try:
            return await self.threads.transfer(connections.close_all, measure, self.client, request, connections)
        finally:
            self._under_way = False


def measure(client: Client, request: MeasureLink, connections: OpenSockets) -> LinkMeasured:
    """Blocking. Closing `connections` ends the test. Raises Unavailable if the test did not finish."""
    peer = ShardSource(request.node, request.endpoint)
    limits, block = _bounded(request.limits), _block(request.token)
    try:
        with client.connected(peer) as line, connections.tracking(line.sock):
            line.ask(LINK, "", request.token, direction="in")
            round_trip_s = _ping(line.sock)
            came = _receive_blocks(line.sock, block, limits)
        with client.connected(peer) as line, connections.tracking(line.sock):
            line.ask(LINK, "", request.token, direction="out")
            went = _send_until_answer(line, request.token, block, limits)
    except OSError as error:
        failure = _failure(error)
        if failure and not connections.closed and not client.sockets.closed:
            return LinkMeasured(failure=failure)
        raise Unavailable(f"{request.node} ({request.endpoint}): {error}") from error
    for taken, way in ((came, "from"), (went, "to")):
        if taken.damaged:
            return LinkMeasured(failure=f"bytes {way} {request.node} were damaged")
        if not taken.nbytes:
            return LinkMeasured(failure=f"no bytes {way} {request.node} arrived within {limits.seconds_max:g} s")
    return LinkMeasured(went.bytes_per_s, came.bytes_per_s, round_trip_s)


def _failure(error: OSError) -> str:
    """Return how the network failed, as one clause; "" if it is not known to have failed."""
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return error.strerror.lower() if error.errno in _UNREACHED and error.strerror else ""


# ---------------------------------------------------------------- both sides


@dataclass(frozen=True, slots=True)
class _Taken:
    nbytes: int
    seconds: float
    damaged: bool

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / max(self.seconds, 1e-6)


def _bounded(limits: LinkLimits) -> LinkLimits:
    blocks = max(1, -(-min(limits.bytes_max, BYTES_MAX) // BLOCK_BYTES))
    return LinkLimits(blocks * BLOCK_BYTES, min(max(limits.seconds_max, 0.01), SECONDS_MAX))


def _block(token: str) -> bytes:
    return hashlib.shake_256(token.encode()).digest(BLOCK_BYTES)


def _receive_blocks(sock: socket.socket, block: bytes, limits: LinkLimits) -> _Taken:
    """Receive blocks until a limit is reached. Raises Unavailable if the other node closes the connection before."""
    buffer = bytearray(len(block))
    view = memoryview(buffer)
    taken = filled = 0
    damaged = False
    began = time.monotonic()
    while taken < limits.bytes_max and (left_s := began + limits.seconds_max - time.monotonic()) > 0:
        sock.settimeout(left_s)
        try:
            received = sock.recv_into(view[filled:])
        except TimeoutError:
            break
        if not received:
            raise Unavailable("the other node closed the connection during the test")
        taken, filled = taken + received, filled + received
        if filled == len(block):
            damaged, filled = damaged or buffer != block, 0
    return _Taken(taken, time.monotonic() - began, damaged)


def _send_blocks(sock: socket.socket, block: bytes, limits: LinkLimits) -> None:
    """Send blocks until a limit is reached or the receiver closes the connection."""
    ends_at = time.monotonic() + limits.seconds_max + ANSWER_S
    for _ in range(limits.bytes_max // len(block)):
        sock.settimeout(max(0.001, ends_at - time.monotonic()))
        try:
            sock.sendall(block)
        except OSError:
            return


def _send_until_answer(line: Line, token: str, block: bytes, limits: LinkLimits) -> _Taken:
    """Send blocks until the receiver reports how many bytes have arrived. Raises TimeoutError without such a report."""
    sock, view = line.sock, memoryview(block)
    left, offset = limits.bytes_max, 0
    ends_at = time.monotonic() + limits.seconds_max + ANSWER_S
    sock.setblocking(False)
    poll = select.poll()
    poll.register(sock, select.POLLIN | select.POLLOUT)
    while True:
        if (now := time.monotonic()) >= ends_at:
            raise TimeoutError("timed out")
        ready = poll.poll((ends_at - now) * 1000)
        if any(events & ~select.POLLOUT for _, events in ready):
            break
        if ready:
            try:
                sent = sock.send(view[offset : offset + left])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                continue
            left, offset = left - sent, (offset + sent) % len(block)
            if not left:
                poll.modify(sock, select.POLLIN)
    frames.block(sock, ANSWER_S)
    answer = line.accepted(token)
    seconds = answer.get("seconds")
    if not isinstance(seconds, float) or seconds < 0:
        raise MalformedMessage("link test seconds", f"{seconds!r}; a number is expected")
    return _Taken(frames.whole_number(answer, "bytes"), seconds, bool(answer.get("damaged")))


def _drain(sock: socket.socket) -> None:
    """Read the remaining bytes, because closing the connection with unread bytes would reset it and lose the answer."""
    ends_at = time.monotonic() + ANSWER_S
    buffer = bytearray(BLOCK_BYTES)
    try:
        while (left_s := ends_at - time.monotonic()) > 0:
            sock.settimeout(left_s)
            if not sock.recv_into(buffer):
                return
    except OSError:
        return


def _ping(sock: socket.socket) -> float:
    """Return the shortest round trip in seconds."""
    shortest = float("inf")
    echo = bytearray(PING_BYTES)
    for number in range(PINGS):
        began = time.monotonic()
        frames.pour(sock, number.to_bytes(PING_BYTES))
        frames.fill(sock, memoryview(echo))
        shortest = min(shortest, time.monotonic() - began)
    return shortest


def _echo(sock: socket.socket) -> None:
    ping = bytearray(PING_BYTES)
    for _ in range(PINGS):
        frames.fill(sock, memoryview(ping))
        frames.pour(sock, bytes(ping))
