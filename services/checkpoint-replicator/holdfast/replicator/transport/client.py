"""The client of the data plane: fetches a shard from a peer, or pushes one to it. Blocking; call from a thread."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from holdfast.domain.errors import IntegrityError, Unavailable
from holdfast.domain.generations import ShardKey, ShardSource
from holdfast.domain.hosts import host_and_port
from holdfast.replicator.names import label
from holdfast.replicator.sockets import OpenSockets, of_one_transfer
from holdfast.replicator.tiers import OpenShard
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.incoming import Incoming
from holdfast.replicator.transport import frames
from holdfast.replicator.transport.frames import Limits
from holdfast.replicator.transport.kept import KeptLines
from holdfast.replicator.transport.lanes import lanes_for, receive_spans, side_by_side
from holdfast.replicator.transport.line import Line
from holdfast.replicator.transport.sealed import encrypted
from holdfast.replicator.transport.secure import Secure
from holdfast.replicator.wanted import Wanted
from holdfast.runtime.freeze import Laps
from holdfast.runtime.trust.tls import CA, CERT, KEY
from holdfast.shards import Manifest

log = structlog.get_logger("holdfast.replicator.transport")

FILES = (CERT, KEY, CA)
ATTEMPTS_MAX = 3  # per source; each attempt resumes the previous one
AWAY_POLL_S = 0.1
TLS_TRIES = 3  # of a connection to a peer that also accepts connections without TLS


class Away(Unavailable):
    """The source's machine answers, but no replicator listens on it."""


@dataclass(frozen=True, slots=True)
class Client:
    limits: Limits
    sockets: OpenSockets  # closed when the service stops, so that no thread stays in a read
    secure: Secure = field(default_factory=Secure)
    kept: KeptLines = field(default_factory=KeptLines)

    def fetch(
        self,
        source: ShardSource,
        job: str,
        token: str,
        wanted: Wanted,
        into: FileTier,
        connections: OpenSockets | None = None,
        patience_s: float = 0.0,
    ) -> Path:
        """Fetch a shard, verify it and commit it in `into`. Closing `connections` cancels the transfer.

        `patience_s`: seconds to wait for a source whose replicator is restarting, so that its machine refuses connections.
        Raises NotFound, Conflict, IntegrityError, OutOfSpace, Away, or Unavailable if the source does not answer or fails
        `ATTEMPTS_MAX` times.
        """
        connections = connections or of_one_transfer()
        attempts = 0
        away: Laps | None = None
        while True:
            try:
                return self._fetch_once(source, job, token, wanted, into, connections)
            except ConnectionRefusedError as error:
                away = away or Laps()
                ended = connections.closed or self.sockets.closed
                if ended or away.spent_s() >= patience_s:
                    raise Away(f"{source.node} ({source.endpoint}): {error}") from error
                time.sleep(AWAY_POLL_S)
            except (OSError, Unavailable) as error:
                attempts += 1
                if attempts == ATTEMPTS_MAX:
                    raise Unavailable(f"{source.node} ({source.endpoint}): {error}") from error

    def push(
        self,
        peer: ShardSource,
        job: str,
        token: str,
        shard: OpenShard,
        pace: Callable[[int], None],
        *,
        sent: bool = False,
    ) -> ShardKey | None:
        """Copy a shard to `peer`. Returns the newest shard of this rank on the peer's disk, when the copy is complete on the
        peer's disk or in its memory. `sent`: the peer had it when it was last asked, so that one connection is enough. Raises
        as `fetch` does.

        Connections of an earlier copy are used again. If one of them turns out to be broken, the copy is sent over new ones."""
        nbytes = 0 if sent else shard.manifest.size
        try:
            if kept := self._kept(peer, nbytes):
                try:
                    return self._push_over(kept, peer, nbytes, job, token, shard, pace)
                except (OSError, Unavailable) as error:
                    if not _has_ended(error):
                        raise
                    log.info("kept connection replaced", peer=peer.node, reason=str(error))
            return self._push_over([], peer, nbytes, job, token, shard, pace)
        except OSError as error:
            raise Unavailable(f"{peer.node} ({peer.endpoint}): {error}") from error

    def _push_over(
        self,
        kept: list[Line],
        peer: ShardSource,
        nbytes: int,
        job: str,
        token: str,
        shard: OpenShard,
        pace: Callable[[int], None],
    ) -> ShardKey | None:
        """As `push`, over these connections and the new ones that it takes."""
        with ExitStack() as stack:
            for line in kept:
                stack.callback(line.close)
            lines = self._lines(stack, peer, nbytes, kept)

            def work(number: int, line: Line) -> Mapping[str, Any] | None:
                return _push_lane(line, job, token, shard, pace, number, len(lines))

            outcomes = side_by_side(lines, work)
            # After all lanes: one connection may finish long before another.
            receipts = [have or line.accepted(token) for have, line in zip(outcomes, lines, strict=True)]
            stack.pop_all()
        for line, receipt in zip(lines, receipts, strict=True):
            self._keep(line, receipt)
        return shard.manifest.key if lines[0].version == 1 else _durable(receipts)

    def _kept(self, peer: ShardSource, nbytes: int) -> list[Line]:
        """Return connections to `peer` that have been kept, and over which this end would still talk to it."""
        lines = self.kept.take(peer, lanes_for(nbytes, self.limits.lanes_max))
        for line in [line for line in lines if not self.secure.still_admits(line.sock)]:
            lines.remove(line)
            line.close()
        return lines

    def _keep(self, line: Line, receipt: Mapping[str, Any]) -> None:
        """Keep the connection if the peer waits for another request on it."""
        challenge = receipt.get("next")
        if not isinstance(challenge, str) or not challenge:
            line.close()
            return
        try:  # a machine that is gone answers nothing: a new connection finds out sooner than the timeout of an answer
            patience_ms = int(self.limits.io_timeout_s * 500)
            line.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_ms)
        except OSError:
            line.close()
            return
        self.kept.put(replace(line, challenge=challenge, nonce=frames.nonce()))

    def read_piece(
        self, source: ShardSource, job: str, token: str, digest: str, offset: int, target: memoryview
    ) -> None:
        """Fill `target` with a piece of the tensors that `source` downloads from the object store. Not verified.

        Raises NotFound if the source does not have the piece in time, and Unavailable.
        """
        try:
            with self.connected(source) as line:
                line.ask("piece", job, token, digest=digest, offset=offset, size=len(target))
                frames.fill(line.sock, target)
        except OSError as error:
            raise Unavailable(f"{source.node} ({source.endpoint}): {error}") from error

    def _fetch_once(
        self,
        source: ShardSource,
        job: str,
        token: str,
        wanted: Wanted,
        into: FileTier,
        connections: OpenSockets,
    ) -> Path:
        key = wanted.key
        with ExitStack() as stack:
            first = stack.enter_context(self.connected(source))
            stack.enter_context(connections.tracking(first.sock))
            manifest = _asked(first, job, token, key)
            if why := wanted.differs(manifest):
                raise IntegrityError(f"{source.node} offers a shard in place of {label(key)}: {why}")
            incoming = stack.enter_context(into.receive(job, manifest))
            lines = self._lines(stack, source, incoming.missing_bytes, [first])
            for line in lines[1:]:
                stack.enter_context(connections.tracking(line.sock))

            def work(number: int, line: Line) -> None:
                if number and _asked(line, job, token, key) != manifest:
                    raise Unavailable(f"{source.node} has replaced {label(key)} during the transfer")
                _fetch_lane(line, token, incoming, incoming.claim(number, len(lines)))

            side_by_side(lines, work)
            return incoming.commit()

    def _lines(self, stack: ExitStack, peer: ShardSource, nbytes: int, first: Sequence[Line]) -> list[Line]:
        """Add connections to the `first` ones for `nbytes`: at least one, and fewer than planned if the peer refuses more."""
        lines = list(first) or [self._opened(stack, peer)]
        lanes = lanes_for(nbytes, self.limits.lanes_max) if lines[0].version > 1 else 1
        try:
            while len(lines) < lanes:
                lines.append(self._opened(stack, peer))
        except (OSError, Unavailable) as error:
            log.info("parallel connections reduced", peer=peer.node, reason=str(error))
        return lines

    def _opened(self, stack: ExitStack, peer: ShardSource) -> Line:
        line = self._connect(peer)
        stack.callback(line.close)
        return line

    @contextmanager
    def connected(self, peer: ShardSource) -> Iterator[Line]:
        """Connect, and receive the greeting. Raises Unavailable, OtherRole if the peer is not who it should be, and OSError.

        A peer that also accepts connections without TLS has greeted without it if the first byte of TLS came late."""
        line = self._connect(peer)
        try:
            yield line
        finally:
            line.close()

    def _connect(self, peer: ShardSource) -> Line:
        """As `connected`; the caller closes the connection."""
        if (address := host_and_port(peer.endpoint)) is None:
            raise Unavailable(f"{peer.node} has no data endpoint ({peer.endpoint!r} is not host:port)")
        began = time.monotonic()
        with ExitStack() as stack:
            for tries_left in reversed(range(TLS_TRIES)):
                sock = stack.enter_context(self.secure.connect(address, self.limits.connect_timeout_s, peer.node))
                stack.enter_context(self.sockets.tracking(sock))
                greeting = self._greeting(sock)
                if not tries_left or not self.secure.late(sock, greeting):
                    break
                stack.close()
            frames.block(sock, self.limits.io_timeout_s)
            challenge, version = str(greeting.get("nonce", "")), frames.whole_number(greeting, "version")
            return Line(peer, sock, challenge, version, began, stack.pop_all())

    def _greeting(self, sock: socket.socket) -> Mapping[str, Any]:
        try:
            return frames.receive(sock, frames.HEADER_BYTES_MAX).fields
        except (TimeoutError, Unavailable) as error:
            if encrypted(sock):
                raise
            raise type(error)(
                f"no greeting ({error}). Replicators that use TLS wait for TLS: {', '.join(FILES)} are needed then "
                "(docs/security.md)"
            ) from error


def _asked(line: Line, job: str, token: str, key: ShardKey) -> Manifest:
    """Request a shard and return the peer's manifest of it."""
    answer = line.ask("get", job, token, **frames.encode_key(key))
    return Manifest.decode(str(answer.get("manifest")).encode())


def _fetch_lane(line: Line, token: str, incoming: Incoming, claimed: list[int]) -> None:
    count = len(incoming.spans)
    line.say(frames.wanted(claimed, count), token)
    coming = claimed if line.version > 1 else range(claimed[0] if claimed else count, count)
    try:
        receive_spans(line.sock, incoming, coming, claimed)
    except IntegrityError:
        frames.send(line.sock, {"ok": False, "error": "corrupt"})  # so that the sender verifies its copy
        raise
    frames.send(line.sock, {"ok": True})


def _push_lane(
    line: Line, job: str, token: str, shard: OpenShard, pace: Callable[[int], None], lane: int, lanes: int
) -> Mapping[str, Any] | None:
    """Send the spans that the peer requests on connection `lane` of `lanes`. Returns the peer's receipt if the peer already
    has the shard."""
    manifest = shard.manifest
    text = manifest.encode().decode()
    answer = line.ask("put", job, token, manifest=text, lane=lane, lanes=lanes, keep=True)
    if answer.get("have"):
        return answer
    for number in frames.wanted_spans(answer, len(manifest.spans)):
        span = manifest.spans[number]
        pace(span.size)
        frames.pour(line.sock, shard.data[span.offset : span.offset + span.size])
    return None


def _has_ended(error: OSError | Unavailable) -> bool:
    """Whether this is the error of a connection that has ended, and not of a peer that takes too long. Such a peer may still be
    receiving the copy, and a second transfer of it would fail together with the first."""
    return not isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT


def _durable(receipts: Sequence[Mapping[str, Any]]) -> ShardKey | None:
    """Return the newest shard on the peer's disk, from its last receipt."""
    durable = receipts[-1].get("durable")
    return frames.decode_key(durable) if isinstance(durable, dict) else None
