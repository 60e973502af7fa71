"""A resumable upload directly from a memory map.

One POST opens the upload session with the CRC-32C of the object, which the server checks before the object exists. One PUT then
sends all bytes. If it fails, the server reports how many bytes it has, and the rest is sent. The same request resolves a lost
answer: the server reports a finished upload, so nothing is stored twice.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

from holdfast.stores.gcs_http import Answer, Connections, Status
from holdfast.stores.patience import Patience, Transient
from holdfast.stores.protocol import Pace

SEND_BYTES = 1 << 20

_PERSISTED = re.compile(r"bytes=0-(\d+)")
_INCOMPLETE = 308
_ABSENT = frozenset((404, 410))


@dataclass(frozen=True, slots=True)
class Upload:
    """`name` and `crc32c` in the form of the API."""

    bucket: str
    name: str
    parts: tuple[memoryview, ...]
    crc32c: str
    if_absent: bool
    metadata: Mapping[str, str]

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))


def upload(http: Connections, what: Upload, patience: Patience, pace: Pace) -> bool:
    """Upload. Returns False if the object existed already. Raises Unavailable; Status if the server rejects the upload."""
    doing = f"writing {what.name} to gs://{what.bucket}"
    session = ""
    persisted = 0
    while True:
        try:
            if not session:
                session, persisted = _begin(http, what), 0
            elif (now := _ask(http, session, what)) is None:
                return True
            else:
                if now > persisted:
                    patience.progressed()
                persisted = now
            _send(http, session, what, persisted, pace)
            return True
        except Transient as error:
            patience.failed(error, doing)
        except Status as error:
            if error.status == 412:
                return False
            if error.status not in _ABSENT or not session:
                raise
            session = ""  # the server no longer knows the session; restart the upload
            patience.failed(Transient(str(error)), doing)


def _begin(http: Connections, what: Upload) -> str:
    """Open an upload session and return its path on the server."""
    query = {"uploadType": "resumable", "name": what.name}
    if what.if_absent:
        query["ifGenerationMatch"] = "0"
    resource = json.dumps({"name": what.name, "crc32c": what.crc32c, "metadata": dict(what.metadata)}).encode()
    headers = {
        "Content-Type": "application/json; charset=UTF-8",
        "X-Upload-Content-Type": "application/octet-stream",
        "X-Upload-Content-Length": str(what.size),
    }
    path = f"/upload/storage/v1/b/{what.bucket}/o?{urlencode(query)}"
    answer = http.send("POST", path, headers, (resource,), len(resource))
    location = _header(answer, "Location")
    if not location:
        raise Transient("the server opened an upload without a location")
    parts = urlsplit(location)
    return f"{parts.path}?{parts.query}"


def _ask(http: Connections, session: str, what: Upload) -> int | None:
    """Return how many bytes the server has; None = the object is finished."""
    answer = http.send("PUT", session, {"Content-Range": f"bytes */{what.size}"})
    if answer.status != _INCOMPLETE:
        return None
    found = _PERSISTED.fullmatch(_header(answer, "Range"))
    return int(found[1]) + 1 if found else 0


def _send(http: Connections, session: str, what: Upload, start: int, pace: Pace) -> None:
    headers = {"Content-Range": f"bytes {start}-{what.size - 1}/{what.size}"}
    answer = http.send("PUT", session, headers, _pieces(what.parts, start, pace), what.size - start)
    if answer.status == _INCOMPLETE:
        raise Transient("the server accepted only a part of the upload")


def _pieces(parts: tuple[memoryview, ...], start: int, pace: Pace) -> Iterator[memoryview]:
    """Yield the bytes from `start` on, in paced pieces."""
    for part in parts:
        for at in range(min(start, len(part)), len(part), SEND_BYTES):
            piece = part[at : at + SEND_BYTES]
            pace(len(piece))
            yield piece
        start = max(start - len(part), 0)


def _header(answer: Answer, name: str) -> str:
    return next((value for key, value in answer.headers.items() if key.lower() == name.lower()), "")


def encode_crc(value: int) -> str:
    """Return a checksum in the form of the API: base64 of the big-endian bytes."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()
