"""The signed messages before a transfer: length-prefixed JSON objects."""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import re
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.domain.errors import IncompatibleVersion, MalformedMessage, Unavailable
from holdfast.domain.generations import ShardKey
from holdfast.replicator.transport.strangers import Strangers
from holdfast.shards.manifest import MANIFEST_BYTES_MAX

PROTOCOL_VERSION = 2  # version 1 has one connection per transfer; both versions are supported
MESSAGE_BYTES_MAX = 2 * MANIFEST_BYTES_MAX  # a manifest is a JSON string in a message
HEADER_BYTES_MAX = 64 << 10  # read and decoded from a peer that has not signed anything yet
_PREFIX = struct.Struct("!4sI")
_MAGIC = b"HFD1"
# Inside a JSON string, the first quotation mark of this pattern would be escaped.
_JOB = re.compile(rb'(?<!\\)"job":("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True, slots=True)
class Limits:
    """Timeouts: `io_timeout_s` for each read or write, `connect_timeout_s` for a connection and its greeting."""

    connect_timeout_s: float = 3.0
    io_timeout_s: float = 10.0
    lanes_max: int = 4  # connections per transfer; a single one saturates neither a fast network nor the processors


def nonce() -> str:
    return secrets.token_hex(16)


def send(sock: socket.socket, message: Mapping[str, Any], *, token: str = "", challenge: str = "") -> None:
    """Send one message, signed if a token is given. `challenge` is the receiver's nonce."""
    body = json.dumps(message, sort_keys=True, separators=(",", ":")).encode()
    signature = _sign(token, challenge, body) if token else b""
    envelope = signature.hex().encode().ljust(64, b"-") + body
    pour(sock, _PREFIX.pack(_MAGIC, len(envelope)) + envelope)


@dataclass(frozen=True, slots=True)
class Received:
    body: bytes
    signature: str
    fields: Mapping[str, Any]

    def signed_by(self, token: str, challenge: str) -> bool:
        """Whether the signature is valid. False also for an empty token, because a job without a secret accepts no peers."""
        expected = _sign(token, challenge, self.body).hex()
        # text must be ASCII for it
        return bool(token) and hmac.compare_digest(self.signature.encode(), expected.encode())


def receive(sock: socket.socket, bytes_max: int = MESSAGE_BYTES_MAX) -> Received:
    """Receive one message. Raises MalformedMessage, Unavailable if the peer closes the connection, and TimeoutError."""
    signature, body = _parts(_exactly(sock, _size(_exactly(sock, _PREFIX.size), bytes_max)))
    return Received(body, signature, _decode(body))


def receive_request(
    sock: socket.socket, challenge: str, token_of: Callable[[str], str], strangers: Strangers, within_s: float
) -> Received:
    """Receive the complete first message of an unknown peer within `within_s` seconds.

    A message of more than `HEADER_BYTES_MAX` takes its memory from `strangers`, and is decoded only if it is signed for its
    job; otherwise the name of the job is its only field. Changes the timeout of the socket. Raises as `receive` does, and
    Unavailable if there is no memory for the message."""
    deadline = time.monotonic() + within_s
    size = _size(_exactly(sock, _PREFIX.size, deadline), MESSAGE_BYTES_MAX)
    if size <= HEADER_BYTES_MAX:
        signature, body = _parts(_exactly(sock, size, deadline))
        return Received(body, signature, _decode(body))
    with strangers.memory(size):
        signature, body = _parts(_exactly(sock, size, deadline))
        found = _JOB.search(body, 0, HEADER_BYTES_MAX)
        job = "" if found is None else _text(found[1])
        request = Received(body, signature, {"job": job})
        if not request.signed_by(token_of(job), challenge):
            return Received(b"", "", request.fields)
        fields = _decode(body)
    if fields.get("job") != job:
        raise MalformedMessage("data plane message", "the message names two jobs")
    return Received(body, signature, fields)


def _size(prefix: bytes, bytes_max: int) -> int:
    magic, size = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise IncompatibleVersion(f"the peer uses another data protocol than {_MAGIC.decode()}")
    if not 64 <= size <= bytes_max:
        raise MalformedMessage("data plane message", f"{size} bytes; 64 to {bytes_max} are accepted")
    return int(size)


def _parts(envelope: bytes) -> tuple[str, bytes]:
    """Return (signature, body). Bytes that are not ASCII are replaced, which makes the signature invalid."""
    return envelope[:64].decode("ascii", "replace"), envelope[64:]


def _decode(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage("data plane message", f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedMessage("data plane message", "not a JSON object")
    return fields


def _text(quoted: bytes) -> str:
    """Decode a JSON string. "" = not a valid JSON string."""
    try:
        return str(json.loads(quoted))
    except ValueError:
        return ""


def encode_key(key: ShardKey) -> dict[str, int]:
    return {"attempt": key.attempt, "step": key.step, "rank": key.rank}


def decode_key(fields: Mapping[str, Any]) -> ShardKey:
    """Raises MalformedMessage unless the key consists of three numbers, because it becomes part of a path."""
    values = tuple(fields.get(name) for name in ("attempt", "step", "rank"))
    if not all(type(value) is int and value >= 0 for value in values):
        raise MalformedMessage("data plane key", f"{values!r}; three whole numbers are expected")
    return ShardKey(*values)  # type: ignore[arg-type]  # checked in the line above


def whole_number(fields: Mapping[str, Any], name: str) -> int:
    """Return a non-negative integer field. Raises MalformedMessage."""
    value = fields.get(name)
    if type(value) is not int or value < 0:
        raise MalformedMessage(f"data plane field {name!r}", f"{value!r}; a whole number is expected")
    return value


def wanted_spans(fields: Mapping[str, Any], count: int) -> Sequence[int]:
    """Return which of `count` spans the other side requests, in this order. Raises MalformedMessage."""
    if (wanted := fields.get("spans")) is None:  # version 1: all spans from a number on
        return range(whole_number(fields, "from"), count)
    if not isinstance(wanted, list) or not all(type(number) is int and 0 <= number < count for number in wanted):
        raise MalformedMessage("data plane spans", f"a list of numbers below {count} is expected")
    return wanted


def wanted(spans: Sequence[int], count: int) -> dict[str, Any]:
    """Return the fields that request these spans. A peer of version 1 reads only "from"."""
    return {"from": spans[0] if spans else count, "spans": list(spans)}


def block(sock: socket.socket, timeout_s: float) -> None:
    """Let reads and writes wait in the kernel, for at most `timeout_s` without progress. A socket with Python's timeout wakes
    up for every packet, which is a tenth of the cost of a transfer. TLS needs Python's timeout."""
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(timeout_s)
        return
    sock.settimeout(None)
    limit = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, limit)


def pour(sock: socket.socket, data: memoryview | bytes) -> None:
    """Send all of `data`. Raises TimeoutError, OSError."""
    try:
        sock.sendall(data)
    except BlockingIOError as error:
        raise TimeoutError("timed out") from error


def fill(sock: socket.socket, buffer: memoryview, deadline: float = math.inf) -> None:
    """Fill `buffer`. Raises Unavailable if the peer closes the connection, and TimeoutError. `deadline` (monotonic clock) is
    for the complete buffer, however slowly the peer sends, and changes the timeout of the socket."""
    flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
    while buffer:
        if deadline < math.inf:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            sock.settimeout(left_s)
        try:
            received = sock.recv_into(buffer, len(buffer), flags)
        except BlockingIOError as error:
            raise TimeoutError("timed out") from error
        if not received:
            raise Unavailable("the peer closed the connection during a transfer")
        buffer = buffer[received:]


def _exactly(sock: socket.socket, size: int, deadline: float = math.inf) -> bytes:
    buffer = bytearray(size)
    fill(sock, memoryview(buffer), deadline)
    return bytes(buffer)


def _sign(token: str, challenge: str, body: bytes) -> bytes:
    return hmac.digest(token.encode(), challenge.encode() + b"|" + body, hashlib.sha256)
