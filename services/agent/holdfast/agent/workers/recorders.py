"""Requests to the worker server that torch runs inside a rank (`holdfast.train.observing.recorder`): HTTP on a Unix socket."""

from __future__ import annotations

import socket
import struct
from pathlib import Path

import anyio
from anyio.abc import SocketAttribute, SocketStream

from holdfast.runtime import freeze
from holdfast.wire.flight_recorder import DUMP_BYTES_MAX

_HEADER_BYTES_MAX = 64 << 10
_OK = b" 200 "


async def post(path: Path, handler: str, query: str, timeout_s: float, uid: int | None = None) -> bytes | None:
    """Return the answer of `handler`; None if no server listens, the handler does not exist, the answer is late, or it is
    larger than a dump can be.

    `uid`: the user of the worker, who may have put a link to the socket of another service there; None = this process's."""
    request = f"POST /handler/{handler}?{query} HTTP/1.0\r\nHost: worker\r\nContent-Length: 0\r\n\r\n"
    answer = bytearray()
    with freeze.patience(timeout_s) as limit:
        try:
            async with await anyio.connect_unix(path) as stream:
                if uid is not None and _owner_of(stream) != uid:
                    return None
                await stream.send(request.encode("ascii"))
                async for part in stream:
                    answer += part
                    if len(answer) > DUMP_BYTES_MAX + _HEADER_BYTES_MAX:
                        return None
        except (OSError, anyio.BrokenResourceError):
            return None
    header, end, body = bytes(answer).partition(b"\r\n\r\n")
    if limit.cancelled_caught or not end or _OK not in header.partition(b"\r\n")[0]:
        return None
    return body


def _owner_of(stream: SocketStream) -> int:
    """Return the uid of the process that listens at the other end."""
    size = struct.calcsize("3i")
    raw = stream.extra(SocketAttribute.raw_socket).getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    uid: int = struct.unpack("3i", raw)[1]
    return uid
