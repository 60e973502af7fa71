"""The server of the data plane: sends shards and receives copies. One thread per connection, with a maximum number."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import structlog

from holdfast.domain.errors import (
    Conflict,
    HoldfastError,
    IncompatibleVersion,
    IntegrityError,
    InvalidSpec,
    MalformedMessage,
    NotFound,
    OutOfSpace,
    Unavailable,
)
from holdfast.domain.names import job_name
from holdfast.replicator.names import label
from holdfast.replicator.sharing import Arrivals
from holdfast.replicator.sockets import OpenSockets
from holdfast.replicator.tiers import LocalTier, OpenShard
from holdfast.replicator.transport import frames
from holdfast.replicator.transport.frames import Limits
from holdfast.replicator.transport.intake import Intake
from holdfast.replicator.transport.kept import SERVER_IDLE_S, Served
from holdfast.replicator.transport.lanes import receive_spans
from holdfast.replicator.transport.links import LINK, LinkDoor
from holdfast.replicator.transport.secure import Secure
from holdfast.replicator.transport.strangers import Strangers
from holdfast.replicator.view import Held, Tier
from holdfast.runtime.processes.readable import readable
from holdfast.shards import Manifest

PIECE_BYTES_MAX = 64 << 20  # in memory at a time, per connection

log = structlog.get_logger("holdfast.replicator.transport")

_ERRORS: tuple[tuple[type[HoldfastError], str], ...] = (
    (NotFound, "not_found"),
    (Conflict, "busy"),
    (IntegrityError, "corrupt"),
    (OutOfSpace, "full"),
)


@dataclass(frozen=True, slots=True)
class Server:
    """Shards are read from `tiers` in order, and pieces of running downloads from `arrivals`. Copies are written to `intake`
    in the niced threads of `takers`, because a peer's copy can wait for local training, but a peer's restore cannot.
    `token_of` returns "" for an unknown job. In the connection's thread, `arrived` is called for each received copy, and
    `suspect` for a shard that a peer found damaged or did not read to its end. `links` admits tests of the network.
    `strangers` limits what connections may occupy until their first message is complete. `secure`: TLS, and who may
    connect."""

    limits: Limits
    sockets: OpenSockets
    tiers: tuple[tuple[Tier, LocalTier], ...]
    arrivals: Arrivals
    intake: Intake
    takers: Executor
    token_of: Callable[[str], str]
    arrived: Callable[[str, Manifest, Tier], None]
    suspect: Callable[[str, Held], None]
    links: LinkDoor = field(default_factory=LinkDoor)
    strangers: Strangers = field(default_factory=Strangers)
    secure: Secure = field(default_factory=Secure)
    served: Served = field(default_factory=Served)

    def serve(self, sock: socket.socket) -> None:
        """Serve one connection: one request, or several copies. Errors caused by the peer are logged and end it."""
        with sock:
            try:
                self._converse(sock)
            except (OSError, Unavailable, MalformedMessage, IncompatibleVersion) as error:
                log.info("connection dropped", reason=str(error) or type(error).__name__)

    def _converse(self, accepted: socket.socket) -> None:
        accepted.settimeout(self.limits.connect_timeout_s)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge = frames.nonce()
        with ExitStack() as stack:
            with self.strangers.connection(str(accepted.getpeername()[0])):
                sock = stack.enter_context(self.secure.begun(accepted))
                stack.enter_context(self.sockets.tracking(sock))
                sock = stack.enter_context(self.secure.admit(sock))
                stack.enter_context(self.sockets.tracking(sock))
                greeting = {"version": frames.PROTOCOL_VERSION, "nonce": challenge, "tls": self.secure.speaks_tls}
                frames.send(sock, greeting)
                request = frames.receive_request(
                    sock, challenge, self.token_of, self.strangers, self.limits.io_timeout_s
                )
            with self.served.place(wanted=request.fields.get("keep") is True) as kept:
                following = frames.nonce() if kept else ""
                while self._answer(sock, challenge, request, following) and following:
                    if (next_request := self._next(sock, following)) is None:
                        return
                    challenge, request, following = following, next_request, frames.nonce()

    def _next(self, sock: socket.socket, challenge: str) -> frames.Received | None:
        """Wait for another request on a connection that is kept. None: the peer has closed it, or would not be admitted now."""
        if not readable(sock, SERVER_IDLE_S):
            return None
        try:
            request = frames.receive_request(sock, challenge, self.token_of, self.strangers, self.limits.io_timeout_s)
        except (OSError, Unavailable):  # the client has closed it
            return None
        return request if self.secure.still_admits(sock) else None

    def _answer(self, sock: socket.socket, challenge: str, request: frames.Received, following: str) -> bool:
        """Answer a request. `following`: the nonce of the next one if the connection is kept. Returns whether the request was a
        copy that has been received or was there."""
        frames.block(sock, self.limits.io_timeout_s)
        fields = request.fields
        is_link = fields.get("op") == LINK
        token = self.links.token if is_link else self.token_of(str(fields.get("job")))
        if not request.signed_by(token, challenge):
            reason = "no test of the network is expected from this peer" if is_link else "unknown job or wrong token"
            frames.send(sock, {"ok": False, "error": "refused", "reason": reason})
            raise Unavailable(f"a request for job {fields.get('job')!r} was refused: {reason}")
        exchange = _Exchange(sock, token, challenge, str(fields.get("nonce", "")))
        if is_link:
            self.links.serve(sock, fields, exchange.answer)
            return False
        try:
            job = job_name(str(fields["job"]))
            match fields.get("op"):
                case "get":
                    self._get(exchange, job, request)
                case "put":
                    self._put(exchange, job, request, {"next": following} if following else {})
                    return True
                case "piece":
                    self._piece(exchange, job, request)
                case other:
                    raise MalformedMessage("data plane op", f"{other!r}; get, put or piece is expected")
        except (NotFound, Conflict, IntegrityError, OutOfSpace, InvalidSpec) as error:
            kind = next((name for kind, name in _ERRORS if isinstance(error, kind)), "refused")
            exchange.answer(ok=False, error=kind, reason=str(error))
        return False

    def _get(self, exchange: _Exchange, job: str, request: frames.Received) -> None:
        key = frames.decode_key(request.fields)
        reasons: list[str] = []
        for tier, files in self.tiers:
            try:
                shard = files.open(job, key)
            except (NotFound, Conflict, IntegrityError) as error:
                reasons.append(f"{files.name}: {error}")
                continue
            with shard:
                whole = _send_shard(exchange, shard)
            if not whole:
                self.suspect(job, Held(tier, key))
            return
        raise NotFound(f"{label(key)}: " + "; ".join(reasons))

    def _put(self, exchange: _Exchange, job: str, request: frames.Received, kept: Mapping[str, str]) -> None:
        manifest = Manifest.decode(str(request.fields.get("manifest")).encode())
        if self._held(job, manifest, request.fields):
            exchange.answer(ok=True, have=True, **self._durable(job, manifest), **kept)
            return
        self.takers.submit(self._take_in, exchange, job, manifest, request.fields).result()
        exchange.answer(ok=True, **self._durable(job, manifest), **kept)

    def _held(self, job: str, manifest: Manifest, fields: Mapping[str, Any]) -> bool:
        tier = self.intake.held(job, manifest)
        return tier is Tier.DISK or (tier is not None and "lanes" in fields)

    def _take_in(self, exchange: _Exchange, job: str, manifest: Manifest, fields: Mapping[str, Any]) -> None:
        # 0: from a peer that supports only the disk as destination.
        lanes = frames.whole_number(fields, "lanes") if "lanes" in fields else 0
        lane = frames.whole_number(fields, "lane") if lanes else 0
        with self.intake.taking(job, manifest, memory=lanes > 0) as taking:
            claimed = taking.incoming.claim(lane, max(lanes, 1))
            count = len(manifest.spans)
            coming = claimed if lanes else range(claimed[0] if claimed else count, count)
            exchange.answer(ok=True, **frames.wanted(claimed, count))
            receive_spans(exchange.sock, taking.incoming, coming, claimed)
            if taking.finish(self.limits.io_timeout_s):
                self.arrived(job, manifest, taking.tier)

    def _durable(self, job: str, manifest: Manifest) -> dict[str, Any]:
        """Return the newest shard of this rank on disk. The sender does not rely on copies in memory."""
        newest = self.intake.disk.newest(job, manifest.rank)
        return {} if newest is None else {"durable": frames.encode_key(newest)}

    def _piece(self, exchange: _Exchange, job: str, request: frames.Received) -> None:
        offset, size = (frames.whole_number(request.fields, name) for name in ("offset", "size"))
        if size > PIECE_BYTES_MAX:
            raise MalformedMessage(
                "data plane piece", f"{size} bytes; at most {PIECE_BYTES_MAX} are allowed in one request"
            )
        content = self.arrivals.read(job, str(request.fields.get("digest")), offset, size)
        exchange.answer(ok=True)
        frames.pour(exchange.sock, memoryview(content))


def _send_shard(exchange: _Exchange, shard: OpenShard) -> bool:
    """Send the requested spans. Returns False if the peer did not confirm the transfer; the shard may be damaged."""
    exchange.answer(ok=True, manifest=shard.manifest.encode().decode())
    wanted = exchange.wanted(len(shard.manifest.spans))
    try:
        for span in (shard.manifest.spans[number] for number in wanted):
            frames.pour(exchange.sock, shard.data[span.offset : span.offset + span.size])
        return bool(frames.receive(exchange.sock).fields.get("ok"))
    except (OSError, Unavailable):
        return False


@dataclass(frozen=True, slots=True)
class _Exchange:
    """The socket of one request, with the values for signing the answers."""

    sock: socket.socket
    token: str
    challenge: str
    peer_nonce: str

    def answer(self, **fields: object) -> None:
        frames.send(self.sock, fields, token=self.token, challenge=self.peer_nonce)

    def wanted(self, count: int) -> Sequence[int]:
        """Receive which of `count` spans the peer requests after it has read the manifest."""
        message = frames.receive(self.sock)
        if not message.signed_by(self.token, self.challenge):
            raise MalformedMessage("data plane resumption", "not signed")
        return frames.wanted_spans(message.fields, count)
