"""Uploads a large object as parallel parts that the server composes.

One stream to Cloud Storage carries about 200 MiB/s, several carry a multiple. Each part is a separate object next to the
target, verified by the server against its own checksum. Before they are composed, their combined checksum must match that of
the target. (XML multipart uploads would not need the compose, but do not support preconditions.) Parts that a crash leaves
have the prefix of their checkpoint and are deleted with it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from threading import Event, Lock
from urllib.parse import quote, urlencode

from holdfast.domain.errors import IntegrityError, InvalidSpec
from holdfast.stores.checksum import combine, of_parts
from holdfast.stores.gcs_http import Connections, Status
from holdfast.stores.gcs_upload import Upload, encode_crc, upload
from holdfast.stores.patience import Patience, Transient
from holdfast.stores.protocol import Pace

PARTS_MAX = 32  # parts that one compose request accepts
PART_BYTES_MIN = 64 << 20


class Stopped(Exception):
    """Another part has failed, so this one is cancelled."""


class Composer:
    """Uploads in parts with `streams` threads."""

    def __init__(
        self, http: Connections, *, streams: int, deadline_s: float, part_bytes_min: int = PART_BYTES_MIN
    ) -> None:
        self._http = http
        self._deadline_s = deadline_s
        self._part_bytes_min = part_bytes_min
        self._pool = ThreadPoolExecutor(streams, thread_name_prefix="gcs-upload")

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def upload(self, what: Upload, token: str, pace: Pace) -> bool:
        """As `gcs_upload.upload`."""
        parts = [
            replace(what, name=f"{what.name}.part-{token}-{number}", parts=pieces, if_absent=False)
            for number, pieces in enumerate(split(what.parts, self._part_bytes_min))
        ]
        try:
            sums = self._upload_parts(parts, pace)
            if encode_crc(combine(sums)) != what.crc32c:
                raise IntegrityError(f"{what.name}: the bytes do not match their checksum")
            return self._compose(what, parts)
        finally:
            self._clear_away(parts)

    def _upload_parts(self, parts: Sequence[Upload], pace: Pace) -> list[tuple[int, int]]:
        """Upload the parts and return (checksum, bytes) of each. No thread reads the parts' memory after the return,
        also not after an error."""
        stop = Event()
        one_at_a_time = Lock()  # a pace function need not be thread-safe

        def paced(nbytes: int) -> None:
            with one_at_a_time:
                if stop.is_set():
                    raise Stopped
                pace(nbytes)

        def one(part: Upload) -> tuple[int, int]:
            value = of_parts(part.parts)
            upload(self._http, replace(part, crc32c=encode_crc(value)), Patience(self._deadline_s), paced)
            return value, part.size

        running = [self._pool.submit(one, part) for part in parts]
        try:
            done, _ = wait(running, return_when=FIRST_EXCEPTION)
            _raise_first(done)
            return [each.result() for each in running]
        finally:
            stop.set()
            for each in running:
                each.cancel()
            wait(running)

    def _compose(self, what: Upload, parts: Sequence[Upload]) -> bool:
        query = {"ifGenerationMatch": "0"} if what.if_absent else {}
        path = f"/storage/v1/b/{what.bucket}/o/{quote(what.name, safe='')}/compose?{urlencode(query)}"
        body = json.dumps(
            {
                "sourceObjects": [{"name": part.name} for part in parts],
                "destination": {"contentType": "application/octet-stream", "metadata": dict(what.metadata)},
            }
        ).encode()
        patience = Patience(self._deadline_s)
        while True:
            try:
                self._http.send("POST", path, {"Content-Type": "application/json; charset=UTF-8"}, (body,), len(body))
                return True
            except Transient as error:
                patience.failed(error, f"composing {what.name} in gs://{what.bucket}")
            except Status as error:
                if error.status == 412:
                    return False
                raise

    def _clear_away(self, parts: Sequence[Upload]) -> None:
        """Delete the parts, up to the first failure. Remaining parts are deleted with their checkpoint."""
        for part in parts:
            try:
                self._http.send("DELETE", f"/storage/v1/b/{part.bucket}/o/{quote(part.name, safe='')}", {})
            except Status as error:
                if error.status != 404:
                    return
            except (Transient, InvalidSpec):
                return


def split(parts: Sequence[memoryview], part_bytes_min: int) -> list[tuple[memoryview, ...]]:
    """Divide the concatenation into at most `PARTS_MAX` equal parts; only the last may be shorter than `part_bytes_min`."""
    size = max(-(-sum(map(len, parts)) // PARTS_MAX), part_bytes_min)
    shares: list[tuple[memoryview, ...]] = []
    share: list[memoryview] = []
    room = size
    for part in parts:
        while len(part):
            piece, part = part[:room], part[room:]
            share.append(piece)
            room -= len(piece)
            if not room:
                shares.append(tuple(share))
                share, room = [], size
    return [*shares, tuple(share)] if share else shares


def _raise_first(done: Iterable[Future[tuple[int, int]]]) -> None:
    """Raise the first failure, ignoring the cancellations that it caused."""
    errors = [error for each in done if (error := each.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
        raise error
