"""The client of the data plane: fetches a shard from a peer, or pushes one to it. Blocking; call from a thread."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from holdfast.domain.errors import Conflict, HoldfastError, IntegrityError, NotFound, OutOfSpace, Unavailable
from holdfast.domain.generations import ShardKey, ShardSource
from holdfast.domain.hosts import host_and_port
from holdfast.replicator.names import label
from holdfast.replicator.sockets import OpenSockets, of_one_transfer
from holdfast.replicator.tiers import OpenShard
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.incoming import Incoming
from holdfast.replicator.transport import frames
from holdfast.replicator.transport.frames import Limits
from holdfast.replicator.transport.lanes import lanes_for, receive_spans, side_by_side
from holdfast.replicator.transport.sealed import encrypted
from holdfast.replicator.transport.secure import Secure
from holdfast.replicator.wanted import Wanted
from holdfast.runtime.freeze import Laps
from holdfast.runtime.tls import CA, CERT, KEY
from holdfast.shards import Manifest

log = structlog.get_logger("holdfast.replicator.transport")

FILES = (CERT, KEY, CA)
ATTEMPTS_MAX = 3  # per source; each attempt resumes the previous one
AWAY_POLL_S = 0.1
TLS_TRIES = 3  # of a connection to a peer that also accepts connections without TLS

# Error codes of a peer's refusal; the reason is text.
_REFUSALS: dict[str, type[HoldfastError]] = {
    "not_found": NotFound,
    "busy": Conflict,
    "corrupt": IntegrityError,
    "full": OutOfSpace,
}


class Away(Unavailable):
    """The source's machine answers, but no replicator listens on it."""


@dataclass(frozen=True, slots=True)
class Client:
    limits: Limits
    sockets: OpenSockets  # closed when the service stops, so that no thread stays in a read
    secure: Secure = field(default_factory=Secure)

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
        as `fetch` does."""
        manifest = shard.manifest
        try:
            with ExitStack() as stack:
                lines = self._lines(stack, peer, 0 if sent else manifest.size)

                def work(number: int, line: Line) -> Mapping[str, Any] | None:
                    return _push_lane(line, job, token, shard, pace, number, len(lines))

                outcomes = side_by_side(lines, work)
                # After all lanes: one connection may finish long before another.
                receipts = [have or line.accepted(token) for have, line in zip(outcomes, lines, strict=True)]
                return manifest.key if lines[0].version == 1 else _durable(receipts)
        except OSError as error:
            raise Unavailable(f"{peer.node} ({peer.endpoint}): {error}") from error

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
            lines = self._lines(stack, source, incoming.missing_bytes, first)
            for line in lines[1:]:
                stack.enter_context(connections.tracking(line.sock))

            def work(number: int, line: Line) -> None:
                if number and _asked(line, job, token, key) != manifest:
                    raise Unavailable(f"{source.node} has replaced {label(key)} during the transfer")
                _fetch_lane(line, token, incoming, incoming.claim(number, len(lines)))

            side_by_side(lines, work)
            return incoming.commit()

    def _lines(self, stack: ExitStack, peer: ShardSource, nbytes: int, first: Line | None = None) -> list[Line]:
        """Open the connections for `nbytes`: at least one, and fewer than planned if the peer refuses more."""
        lines = [first or stack.enter_context(self.connected(peer))]
        lanes = lanes_for(nbytes, self.limits.lanes_max) if lines[0].version > 1 else 1
        try:
            while len(lines) < lanes:
                lines.append(stack.enter_context(self.connected(peer)))
        except (OSError, Unavailable) as error:
            log.info("parallel connections reduced", peer=peer.node, reason=str(error))
        return lines

    @contextmanager
    def connected(self, peer: ShardSource) -> Iterator[Line]:
        """Connect, and receive the greeting. Raises Unavailable, OtherRole if the peer is not who it should be, and OSError.

        A peer that also accepts connections without TLS has greeted without it if the first byte of TLS came late."""
        if (address := host_and_port(peer.endpoint)) is None:
            raise Unavailable(f"{peer.node} has no data endpoint ({peer.endpoint!r} is not host:port)")
        with ExitStack() as stack:
            for tries_left in reversed(range(TLS_TRIES)):
                sock = stack.enter_context(self.secure.connect(address, self.limits.connect_timeout_s, peer.node))
                stack.enter_context(self.sockets.tracking(sock))
                greeting = self._greeting(sock)
                if not tries_left or not self.secure.late(sock, greeting):
                    break
                stack.close()
            frames.block(sock, self.limits.io_timeout_s)
            yield Line(peer, sock, str(greeting.get("nonce", "")), frames.whole_number(greeting, "version"))

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


@dataclass(frozen=True, slots=True)
class Line:
    """A connection after the greeting, with the values for signing messages."""

    peer: ShardSource
    sock: socket.socket
    challenge: str
    version: int
    nonce: str = field(default_factory=frames.nonce)

    def say(self, message: Mapping[str, Any], token: str) -> None:
        frames.send(self.sock, message, token=token, challenge=self.challenge)

    def ask(self, op: str, job: str, token: str, **fields: object) -> Mapping[str, Any]:
        """Send a request and return the fields of the answer. Raises as `accepted` does."""
        self.say({"op": op, "job": job, **fields, "nonce": self.nonce}, token)
        return self.accepted(token)

    def accepted(self, token: str) -> Mapping[str, Any]:
        """Return the fields of a positive answer. It must be signed, so that only a holder of the token can send shards. A
        refusal needs no signature."""
        answer = frames.receive(self.sock)
        name = f"{self.peer.node} ({self.peer.endpoint})"
        if not answer.fields.get("ok"):
            kind = _REFUSALS.get(str(answer.fields.get("error")), Unavailable)
            raise kind(f"{name} refused: {answer.fields.get('reason', 'no reason given')}")
        if not answer.signed_by(token, self.nonce):
            raise Unavailable(f"{name} does not know this job's token")
        return answer.fields


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
    answer = line.ask("put", job, token, manifest=manifest.encode().decode(), lane=lane, lanes=lanes)
    if answer.get("have"):
        return answer
    for number in frames.wanted_spans(answer, len(manifest.spans)):
        span = manifest.spans[number]
        pace(span.size)
        frames.pour(line.sock, shard.data[span.offset : span.offset + span.size])
    return None


def _durable(receipts: Sequence[Mapping[str, Any]]) -> ShardKey | None:
    """Return the newest shard on the peer's disk, from its last receipt."""
    durable = receipts[-1].get("durable")
    return frames.decode_key(durable) if isinstance(durable, dict) else None
