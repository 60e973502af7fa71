"""`gs://`: Google Cloud Storage.

The client library authenticates (application default credentials; none with STORAGE_EMULATOR_HOST), lists, looks up, deletes
and stores small objects, including manifests. Large objects use `gcs_http`: ranged GETs directly into the memory map, several
in parallel, and resumable uploads directly from it (`gcs_upload`), the largest in parts (`gcs_compose`).

"Only if absent" is the precondition `ifGenerationMatch=0`. An upload has a token in the object's metadata: if an answer was
lost and the second attempt finds the object, the token shows whether this process wrote it."""

from __future__ import annotations

import base64
import os
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPResponse
from threading import Event, Lock
from typing import Any
from urllib.parse import quote

from holdfast.domain.distribution import install_command
from holdfast.domain.errors import IntegrityError, InvalidSpec, NotFound, Unavailable
from holdfast.stores.checksum import crc32c as checksum
from holdfast.stores.checksum import of_parts
from holdfast.stores.gcs_compose import Composer
from holdfast.stores.gcs_http import Authorize, Connections, Status, fill
from holdfast.stores.gcs_upload import Upload, encode_crc, upload
from holdfast.stores.patience import Patience, Transient
from holdfast.stores.protocol import ObjectInfo, Pace, check_key, unpaced

try:
    import google.auth
    import google.auth.transport.requests
    import requests
    from google.api_core import exceptions as answers
    from google.auth import exceptions as auth_errors
    from google.cloud import storage
    from google.cloud.storage.retry import DEFAULT_RETRY
except ImportError as error:
    raise InvalidSpec("store", "gs://…", f"the extra that it needs: {install_command('gcs')}") from error

_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
TOKEN = "holdfast-writer"  # key in an object's metadata
EMULATOR = "STORAGE_EMULATOR_HOST"  # the library's default
# The library (seen in 3.17) looks up each bucket in a background thread, for the attributes of its traces, also if traces are
# off. This lookup requires a permission that writing objects does not, and continues for two minutes after the store is closed.
_NO_BUCKET_LOOKUP = "DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA"

_RETRIED_BY_LIBRARY = (
    answers.RetryError,
    answers.TooManyRequests,
    answers.ServerError,
    requests.RequestException,
    auth_errors.TransportError,
)
_REFUSALS = (answers.Forbidden, answers.Unauthorized, auth_errors.GoogleAuthError)


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsOptions:
    """`timeout_s`: seconds without a byte on a connection. `deadline_s`: limit for an operation that fails repeatedly."""

    timeout_s: float = 20.0
    deadline_s: float = 120.0
    streams: int = 4  # for large downloads, and the same number for large uploads
    range_bytes: int = 64 << 20  # larger objects are read in parallel ranges
    small_bytes: int = 4 << 20  # smaller objects are stored by the library, in one request
    # larger objects are stored as parallel parts, because one stream would take 10 s or more
    composed_bytes: int = 2 << 30
    part_bytes: int = 64 << 20  # minimum size of a part


class GcsStore:
    """Objects of one bucket below `prefix`."""

    def __init__(self, bucket: str, prefix: str = "", options: GcsOptions | None = None) -> None:
        """Raises InvalidSpec if there are no credentials."""
        self._name = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._options = options or GcsOptions()
        self._client, authorize = _sign_in()
        self._bucket = self._client.bucket(bucket)
        self._retry = DEFAULT_RETRY.with_timeout(self._options.deadline_s)
        self._http = Connections(self._client.api_endpoint, authorize, timeout_s=self._options.timeout_s)
        self._pool = ThreadPoolExecutor(self._options.streams, thread_name_prefix="gcs-download")
        self._composer = Composer(
            self._http,
            streams=self._options.streams,
            deadline_s=self._options.deadline_s,
            part_bytes_min=self._options.part_bytes,
        )

    @property
    def url(self) -> str:
        return f"gs://{self._name}/{self._prefix}".rstrip("/")

    # ------------------------------------------------------------ writing

    def put(
        self,
        key: str,
        parts: Sequence[memoryview | bytes],
        *,
        crc32c: int,
        if_absent: bool = False,
        pace: Pace = unpaced,
    ) -> bool:
        check_key(key)
        views = [memoryview(part).cast("B") for part in parts]
        token = uuid.uuid4().hex
        if sum(map(len, views)) <= self._options.small_bytes:
            stored = self._put_small(key, views, crc32c, if_absent, token, pace)
        else:
            stored = self._put_large(key, views, crc32c, if_absent, token, pace)
        return stored or self._is_ours(key, token)

    def _put_small(
        self, key: str, views: list[memoryview], crc32c: int, if_absent: bool, token: str, pace: Pace
    ) -> bool:
        if of_parts(views) != crc32c:
            raise IntegrityError(f"{key}: the bytes do not match their checksum {crc32c:08x}")
        content = b"".join(views)
        pace(len(content))
        blob = self._blob(key)
        blob.metadata = {TOKEN: token}
        try:
            with self._errors(key):
                blob.upload_from_string(
                    content,
                    content_type="application/octet-stream",
                    if_generation_match=0 if if_absent else None,
                    checksum="crc32c",
                    timeout=self._options.timeout_s,
                    retry=self._retry,
                )
        except answers.PreconditionFailed:
            return False
        return True

    def _put_large(
        self, key: str, views: list[memoryview], crc32c: int, if_absent: bool, token: str, pace: Pace
    ) -> bool:
        what = Upload(
            bucket=self._name,
            name=self._prefix + key,
            parts=tuple(views),
            crc32c=encode_crc(crc32c),
            if_absent=if_absent,
            metadata={TOKEN: token},
        )
        with self._errors(key):
            if what.size > self._options.composed_bytes:
                return self._composer.upload(what, token, pace)
            return upload(self._http, what, self._patience(), pace)

    def _is_ours(self, key: str, token: str) -> bool:
        with self._errors(key):
            blob = self._bucket.get_blob(self._prefix + key, timeout=self._options.timeout_s, retry=self._retry)
        return blob is not None and (blob.metadata or {}).get(TOKEN) == token

    def delete(self, key: str) -> None:
        check_key(key)
        try:
            with self._errors(key):
                self._blob(key).delete(timeout=self._options.timeout_s, retry=self._retry)
        except NotFound:
            return

    # ------------------------------------------------------------ reading

    def read_into(self, key: str, target: memoryview, offset: int = 0) -> None:
        target = target.cast("B")
        size = self._options.range_bytes
        if len(target) <= size:
            self._read_range(key, target, offset, Event())
            return
        stop = Event()
        ranges = [
            self._pool.submit(self._read_range, key, target[start : start + size], offset + start, stop)
            for start in range(0, len(target), size)
        ]
        try:
            done, _ = wait(ranges, return_when=FIRST_EXCEPTION)
            for each in done:
                each.result()
        finally:
            # No thread may write to the target after the return, also not after an error.
            stop.set()
            for each in ranges:
                each.cancel()
            wait(ranges)

    def _read_range(self, key: str, target: memoryview, offset: int, stop: Event) -> None:
        """Read a range over one connection at a time; a new connection resumes after a failure."""
        patience = self._patience()
        done = 0
        while done < len(target) and not stop.is_set():
            headers = {"Range": f"bytes={offset + done}-{offset + len(target) - 1}"}
            try:
                with self._errors(key), self._http.receive(self._media(key), headers) as response:
                    if response.status != 206 or _length(response) != len(target) - done:
                        raise IntegrityError(f"{key} ends before byte {offset + len(target)}")
                    for read in fill(response, target[done:]):
                        done += read
                        patience.progressed()
                        if stop.is_set():
                            return
            except Transient as error:
                patience.failed(error, f"reading {key} of {self.url}")

    def read(self, key: str, size_max: int) -> bytes:
        patience = self._patience()
        while True:
            try:
                return self._read_whole(key, size_max)
            except Transient as error:
                patience.failed(error, f"reading {key} of {self.url}")

    def _read_whole(self, key: str, size_max: int) -> bytes:
        with self._errors(key), self._http.receive(self._media(key), {}) as response:
            size = _length(response)
            if size > size_max:
                raise IntegrityError(f"{key} has {size} bytes, more than the limit of {size_max}")
            content = bytearray(size)
            for _ in fill(response, memoryview(content)):
                pass
            stated = [item for item in (response.headers.get("X-Goog-Hash") or "").split(",") if "crc32c=" in item]
        if stated and stated[0].strip() != f"crc32c={encode_crc(checksum(memoryview(content)))}":
            raise Transient("the received bytes do not match their checksum")
        return bytes(content)

    def stat(self, key: str) -> ObjectInfo | None:
        check_key(key)
        with self._errors(key):
            blob = self._bucket.get_blob(self._prefix + key, timeout=self._options.timeout_s, retry=self._retry)
        return None if blob is None else self._info(blob)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._errors(prefix):
            for blob in self._client.list_blobs(
                self._bucket,
                prefix=self._prefix + prefix,
                fields="items(name,size,crc32c,updated),nextPageToken",
                timeout=self._options.timeout_s,
                retry=self._retry,
            ):
                yield self._info(blob)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._composer.close()
        self._http.close()
        self._client.close()

    # ------------------------------------------------------------ inside

    def _patience(self) -> Patience:
        return Patience(self._options.deadline_s)

    def _blob(self, key: str) -> Any:
        return self._bucket.blob(self._prefix + key)

    def _media(self, key: str) -> str:
        return f"/download/storage/v1/b/{self._name}/o/{quote(self._prefix + check_key(key), safe='')}?alt=media"

    def _info(self, blob: Any) -> ObjectInfo:
        crc32c = None if blob.crc32c is None else int.from_bytes(base64.b64decode(blob.crc32c), "big")
        return ObjectInfo(blob.name.removeprefix(self._prefix), int(blob.size), crc32c, blob.updated.timestamp())

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        """Convert errors of the library and the server to Holdfast's. PreconditionFailed and Transient pass to the caller."""
        try:
            yield
        except answers.PreconditionFailed:
            raise
        except answers.NotFound as error:
            raise self._absent(key, str(error)) from error
        except Status as error:
            if error.status == 404:
                raise self._absent(key, str(error)) from error
            if error.status == 416:
                raise IntegrityError(f"{key} ends before the requested bytes") from error
            raise self._refused(error) from error
        except _RETRIED_BY_LIBRARY as error:
            raise Unavailable(f"{self.url} does not answer ({key}): {error}") from error
        except (*_REFUSALS, answers.ClientError) as error:
            raise self._refused(error) from error

    def _absent(self, key: str, message: str) -> Exception:
        if "bucket does not exist" in message:
            return InvalidSpec("store", self.url, "a bucket that exists")
        return NotFound(f"{key} does not exist in {self.url}")

    def _refused(self, error: Exception) -> Exception:
        if "CRC32C" in str(error):
            return IntegrityError(f"{self.url} refused the upload: {str(error)[:200]}")
        return InvalidSpec("store", self.url, f"a bucket that this account may use ({str(error)[:200]})")


def _sign_in() -> tuple[Any, Authorize]:
    """Return the library's client, and a function that signs this module's requests with the same credentials."""
    os.environ.setdefault(_NO_BUCKET_LOOKUP, "true")
    if os.environ.get(EMULATOR):
        client = storage.Client(project="emulated")
        return client, lambda method, url, headers: None
    credentials: Any
    try:
        credentials, project = google.auth.default(scopes=_SCOPES)
    except auth_errors.DefaultCredentialsError as error:
        raise InvalidSpec(
            "store", "gs://…", f"application default credentials: gcloud auth application-default login ({error})"
        ) from error
    request = google.auth.transport.requests.Request()
    lock = Lock()  # one refresh at a time

    def authorize(method: str, url: str, headers: dict[str, str]) -> None:
        try:
            with lock:
                credentials.before_request(request, method, url, headers)
        except auth_errors.TransportError as error:
            raise Transient(f"signing in: {error}") from error
        except auth_errors.GoogleAuthError as error:
            raise InvalidSpec("credentials of the object store", str(error), "valid credentials") from error

    return storage.Client(project=project or "none", credentials=credentials), authorize


def _length(response: HTTPResponse) -> int:
    return int(response.headers.get("Content-Length") or 0)
