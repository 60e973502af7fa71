"""The signed messages before a transfer: length-prefixed JSON objects."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.domain.errors import IncompatibleVersion, MalformedMessage, Unavailable
from holdfast.domain.generations import ShardKey
from holdfast.shards.manifest import MANIFEST_BYTES_MAX

PROTOCOL_VERSION = 2  # version 1 has one connection per transfer; both versions are supported
MESSAGE_BYTES_MAX = 2 * MANIFEST_BYTES_MAX  # a manifest is a JSON string in a message
_PREFIX = struct.Struct("!4sI")
_MAGIC = b"HFD1"


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
        return bool(token) and hmac.compare_digest(self.signature, expected)


def receive(sock: socket.socket) -> Received:
    """Receive one message. Raises MalformedMessage, Unavailable if the peer closes the connection, and TimeoutError."""
    magic, size = _PREFIX.unpack(_exactly(sock, _PREFIX.size))
    if magic != _MAGIC:
        raise IncompatibleVersion(f"the peer speaks another data protocol than {_MAGIC.decode()}")
    if not 64 <= size <= MESSAGE_BYTES_MAX:
        raise MalformedMessage("data plane message", f"{size} bytes; at most {MESSAGE_BYTES_MAX} are taken")
    envelope = _exactly(sock, size)
    try:
        signature, fields = envelope[:64].decode("ascii"), json.loads(envelope[64:])
    except ValueError as error:
        raise MalformedMessage("data plane message", f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise MalformedMessage("data plane message", "not a JSON object")
    return Received(envelope[64:], signature, fields)


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
    up for every packet, which is a tenth of the cost of a transfer."""
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


def fill(sock: socket.socket, buffer: memoryview) -> None:
    """Fill `buffer`. Raises Unavailable if the peer closes the connection, and TimeoutError."""
    while buffer:
        try:
            received = sock.recv_into(buffer, 0, socket.MSG_WAITALL)
        except BlockingIOError as error:
            raise TimeoutError("timed out") from error
        if not received:
            raise Unavailable("the peer hung up in the middle of a transfer")
        buffer = buffer[received:]


def _exactly(sock: socket.socket, size: int) -> bytes:
    buffer = bytearray(size)
    fill(sock, memoryview(buffer))
    return bytes(buffer)


def _sign(token: str, challenge: str, body: bytes) -> bytes:
    return hmac.digest(token.encode(), challenge.encode() + b"|" + body, hashlib.sha256)
