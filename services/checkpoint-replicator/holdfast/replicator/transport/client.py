"""The end that connects: fetch a shard from a peer, or push one to it. Blocking; call from a thread."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.domain.errors import Conflict, HoldfastError, IntegrityError, NotFound, OutOfSpace, Unavailable
from holdfast.domain.generations import ShardKey, ShardSource
from holdfast.replicator.names import label
from holdfast.replicator.sockets import Abort, OpenSockets
from holdfast.replicator.tiers import OpenShard
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.transport import frames
from holdfast.replicator.transport.frames import Limits
from holdfast.shards import Manifest

ATTEMPTS_MAX = 3  # per source, each going on where the one before broke off

# What a peer's refusal means here; the reason travels as text.
_REFUSALS: dict[str, type[HoldfastError]] = {
    "not_found": NotFound,
    "busy": Conflict,
    "corrupt": IntegrityError,
    "full": OutOfSpace,
}


@dataclass(frozen=True, slots=True)
class Client:
    limits: Limits
    sockets: OpenSockets  # all of them are closed when the service stops: no thread stays behind in a read

    def fetch(
        self,
        source: ShardSource,
        job: str,
        token: str,
        key: ShardKey,
        digest: str,
        into: FileTier,
        abort: Abort | None = None,
    ) -> Path:
        """Bring a shard here, verified and committed in `into`; `abort` can end it before that.

        Raises NotFound, Conflict, IntegrityError, OutOfSpace, or Unavailable when the source does not answer or breaks off
        `ATTEMPTS_MAX` times.
        """
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                return self._fetch_once(source, job, token, key, digest, into, abort or Abort())
            except (OSError, Unavailable) as error:
                if attempt == ATTEMPTS_MAX or isinstance(error, ConnectionRefusedError):
                    raise Unavailable(f"{source.node} ({source.endpoint}): {error}") from error
        raise AssertionError("unreachable: the last attempt returns or raises")

    def push(self, peer: ShardSource, job: str, token: str, shard: OpenShard, pace: Callable[[int], None]) -> None:
        """Have a copy at `peer`; returns when it is committed there (or already was). Raises as `fetch` does."""
        try:
            self._push_once(peer, job, token, shard, pace)
        except OSError as error:
            raise Unavailable(f"{peer.node} ({peer.endpoint}): {error}") from error

    def read_piece(
        self, source: ShardSource, job: str, token: str, digest: str, offset: int, target: memoryview
    ) -> None:
        """Fill `target` with a piece of the tensors that `source` is taking from the object store; not verified.

        Raises NotFound when it does not have it in time, Unavailable.
        """
        try:
            with self._connected(source) as (sock, challenge):
                own = frames.nonce()
                piece = {"digest": digest, "offset": offset, "size": len(target)}
                request = {"op": "piece", "job": job, **piece, "nonce": own}
                frames.send(sock, request, token=token, challenge=challenge)
                _accepted(frames.receive(sock), source, token, own)
                frames.fill(sock, target)
        except OSError as error:
            raise Unavailable(f"{source.node} ({source.endpoint}): {error}") from error

    def _fetch_once(
        self, source: ShardSource, job: str, token: str, key: ShardKey, digest: str, into: FileTier, abort: Abort
    ) -> Path:
        with self._connected(source) as (sock, challenge), abort.watching(sock):
            own = frames.nonce()
            request = {"op": "get", "job": job, **frames.encode_key(key), "nonce": own}
            frames.send(sock, request, token=token, challenge=challenge)
            answer = _accepted(frames.receive(sock), source, token, own)
            manifest = Manifest.decode(str(answer.get("manifest")).encode())
            if manifest.key != key or (digest and manifest.digest != digest):
                raise IntegrityError(
                    f"{source.node} offers {label(manifest.key)} with digest {manifest.digest}, not {label(key)} with {digest}"
                )
            with into.receive(job, manifest) as incoming:
                frames.send(sock, {"from": incoming.next_span}, token=token, challenge=challenge)
                try:
                    with closing(frames.spans(sock, manifest.spans[incoming.next_span :])) as contents:
                        incoming.write_all(contents)
                except IntegrityError:
                    frames.send(sock, {"ok": False, "error": "corrupt"})  # so that its holder looks, too
                    raise
                path = incoming.commit()
            frames.send(sock, {"ok": True})
            return path

    def _push_once(
        self, peer: ShardSource, job: str, token: str, shard: OpenShard, pace: Callable[[int], None]
    ) -> None:
        manifest = shard.manifest
        with self._connected(peer) as (sock, challenge):
            own = frames.nonce()
            request = {"op": "put", "job": job, "manifest": manifest.encode().decode(), "nonce": own}
            frames.send(sock, request, token=token, challenge=challenge)
            answer = _accepted(frames.receive(sock), peer, token, own)
            if answer.get("have"):
                return
            for span in manifest.spans[frames.span_number(answer) :]:
                pace(span.size)
                sock.sendall(shard.data[span.offset : span.offset + span.size])
            _accepted(frames.receive(sock), peer, token, own)

    @contextmanager
    def _connected(self, peer: ShardSource) -> Iterator[tuple[socket.socket, str]]:
        host, _, port = peer.endpoint.rpartition(":")
        if not host or not port.isdecimal():
            raise Unavailable(f"{peer.node} has no data endpoint ({peer.endpoint!r} is not host:port)")
        address = (host.strip("[]"), int(port))
        with (
            socket.create_connection(address, self.limits.connect_timeout_s) as sock,
            self.sockets.tracking(sock),
        ):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeting = frames.receive(sock).fields
            sock.settimeout(self.limits.io_timeout_s)
            yield sock, str(greeting.get("nonce", ""))


def _accepted(answer: frames.Received, peer: ShardSource, token: str, own_nonce: str) -> Any:
    """The fields of a yes. A refusal needs no signature, a yes does: nobody but a holder of the token can feed us."""
    fields = answer.fields
    if not fields.get("ok"):
        kind = _REFUSALS.get(str(fields.get("error")), Unavailable)
        raise kind(f"{peer.node} ({peer.endpoint}) refused: {fields.get('reason', 'no reason given')}")
    if not answer.signed_by(token, own_nonce):
        raise Unavailable(f"{peer.node} ({peer.endpoint}) does not know this job's token")
    return fields
