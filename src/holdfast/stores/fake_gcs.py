"""A small Google Cloud Storage server on loopback, for tests and benchmarks: the part of the JSON API that Holdfast and the
client library use, with preconditions, CRC-32C checks and injected faults.

    with FakeGcs() as server:
        server.fault(status=503, method="PUT", times=2)
        os.environ["STORAGE_EMULATOR_HOST"] = server.endpoint

`python -m holdfast.stores.fake_gcs` prints its endpoint and serves until it is stopped. Every bucket exists except those in
`missing_buckets`.
"""

from __future__ import annotations

import base64
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

from holdfast.stores.checksum import crc32c

PAGE_OBJECTS = 1000
PIECE_BYTES = 1 << 20
REQUEST_BYTES_MAX = 16 << 30
COMPOSE_SOURCES_MAX = 32

_OBJECT = re.compile(r"/(?:download/)?storage/v1/b/([^/]+)/o/([^/]+)")
_OBJECTS = re.compile(r"/(upload/)?storage/v1/b/([^/]+)/o")
_COMPOSE = re.compile(r"/storage/v1/b/([^/]+)/o/([^/]+)/compose")
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")


@dataclass(slots=True)
class HttpFault:
    """A fault of the next `times` requests that match.

    `status`: status of the answer. Without it, the connection is closed: after `after_bytes` of the body, sent or received, or
    with `answer_lost` after the operation and before the answer. `stall_s`: wait first.
    """

    method: str = ""
    path_part: str = ""
    status: int = 0
    stall_s: float = 0.0
    after_bytes: int | None = None
    answer_lost: bool = False
    times: int = 1


@dataclass(frozen=True, slots=True)
class StoredObject:
    content: bytearray
    generation: int
    crc32c: int
    metadata: Mapping[str, str]
    updated_at: float


@dataclass(slots=True)
class Session:
    """A resumable upload."""

    bucket: str
    name: str
    precondition: str | None
    resource: dict[str, Any]
    content: bytearray = field(default_factory=bytearray)  # of the object's size, if that is known
    received: int = 0
    finished: dict[str, Any] | None = None  # the resource of the finished object


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class Broken(Exception):
    """Close the connection without an answer, as an injected fault."""


class FakeGcs:
    """The server, in its own threads. `requests` records (method, path with query)."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self.objects: dict[tuple[str, str], StoredObject] = {}
        self.sessions: dict[str, Session] = {}
        self.faults: list[HttpFault] = []
        self.requests: list[tuple[str, str]] = []
        self.page_objects = PAGE_OBJECTS
        self.missing_buckets: set[str] = set()
        self.lock = threading.RLock()
        self.stopped = threading.Event()
        self._generation = 0
        self._server = _Server((host, port), _handler(self))
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="fake-gcs")

    @property
    def endpoint(self) -> str:
        """The value for STORAGE_EMULATOR_HOST."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        self._server.shutdown()
        self._thread.join()
        self._server.close_connections()
        self._server.server_close()

    def fault(self, **what: Any) -> None:
        """Inject a fault, see `HttpFault`."""
        with self.lock:
            self.faults.append(HttpFault(**what))

    def take_fault(self, method: str, path: str) -> HttpFault | None:
        with self.lock:
            self.requests.append((method, path))
            for fault in self.faults:
                if fault.times and fault.method in ("", method) and fault.path_part in path:
                    fault.times -= 1
                    return fault
        return None

    def rot(self, bucket: str, name: str, offset: int) -> None:
        """Flip a bit of a stored object."""
        self.objects[bucket, name].content[offset] ^= 1

    def store(
        self, bucket: str, name: str, content: bytearray, resource: Mapping[str, Any], precondition: str | None
    ) -> dict[str, Any]:
        """Finish an upload. Raises Refused: 412 if the precondition fails, 400 if the checksum is wrong."""
        value = crc32c(memoryview(content))
        claimed = resource.get("crc32c")
        if claimed is not None and claimed != encode_crc(value):
            raise Refused(400, f'Provided CRC32C "{claimed}" doesn\'t match calculated CRC32C "{encode_crc(value)}".')
        with self.lock:
            held = self.objects.get((bucket, name))
            if precondition is not None and int(precondition) != (held.generation if held else 0):
                raise Refused(412, "At least one of the pre-conditions you specified did not hold.")
            self._generation += 1
            metadata = dict(resource.get("metadata") or {})
            self.objects[bucket, name] = StoredObject(content, self._generation, value, metadata, time.time())
            return self.resource(bucket, name)

    def get(self, bucket: str, name: str) -> StoredObject:
        with self.lock:
            found = self.objects.get((bucket, name))
        if found is None:
            raise Refused(404, f"No such object: {bucket}/{name}")
        return found

    def resource(self, bucket: str, name: str) -> dict[str, Any]:
        found = self.get(bucket, name)
        moment = datetime.fromtimestamp(found.updated_at, UTC).isoformat().replace("+00:00", "Z")
        return {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{found.generation}",
            "bucket": bucket,
            "name": name,
            "generation": str(found.generation),
            "metageneration": "1",
            "size": str(len(found.content)),
            "crc32c": encode_crc(found.crc32c),
            "timeCreated": moment,
            "updated": moment,
            "metadata": dict(found.metadata),
        }


def encode_crc(value: int) -> str:
    """Return a checksum as in the JSON API: base64 of the big-endian bytes."""
    return base64.b64encode(value.to_bytes(4, "big")).decode()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = True
    request_queue_size = 64

    def __init__(self, *arguments: Any) -> None:
        self._connections: set[socket.socket] = set()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a disconnecting client is not an error
            super().handle_error(request, client_address)

    def close_connections(self) -> None:
        for connection in list(self._connections):
            with suppress(OSError):  # its thread is closing it
                connection.shutdown(socket.SHUT_RDWR)


def _handler(server: FakeGcs) -> type[BaseHTTPRequestHandler]:
    class Handler(_Handler):
        gcs = server

    return Handler


class _Handler(BaseHTTPRequestHandler):
    gcs: FakeGcs
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    rbufsize = 64 << 10

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Log nothing."""

    def _serve(self) -> None:
        self._fault = self.gcs.take_fault(self.command, self.path)
        self._unread = int(self.headers.get("Content-Length") or 0)
        try:
            self._try()
        except (Broken, ConnectionError):
            self.close_connection = True

    def _try(self) -> None:
        try:
            if self._fault and self._fault.stall_s:
                self.gcs.stopped.wait(self._fault.stall_s)
            if self._fault and self._fault.status:
                raise Refused(self._fault.status, "injected fault")
            self._route(urlsplit(self.path))
        except Refused as refused:
            self._discard()
            self._answer(refused.status, {"error": {"code": refused.status, "message": str(refused)}})

    def _route(self, url: Any) -> None:
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        if any(f"/b/{bucket}/" in url.path for bucket in self.gcs.missing_buckets):
            raise Refused(404, "The specified bucket does not exist.")
        if found := _COMPOSE.fullmatch(url.path):
            self._compose(unquote(found[1]), unquote(found[2]), query)
        elif found := _OBJECT.fullmatch(url.path):
            self._object(unquote(found[1]), unquote(found[2]), query)
        elif found := _OBJECTS.fullmatch(url.path):
            bucket = unquote(found[2])
            if found[1]:
                self._upload(bucket, query)
            else:
                self._list(bucket, query)
        else:
            raise Refused(501, f"the fake does not know {self.command} {url.path}")

    # ------------------------------------------------------------ objects

    def _object(self, bucket: str, name: str, query: Mapping[str, str]) -> None:
        if self.command == "DELETE":
            self.gcs.get(bucket, name)
            with self.gcs.lock:
                self.gcs.objects.pop((bucket, name), None)
            self._answer(204, None)
        elif query.get("alt") == "media":
            self._send_content(self.gcs.get(bucket, name))
        else:
            self._answer(200, self.gcs.resource(bucket, name))

    def _send_content(self, found: StoredObject) -> None:
        whole = memoryview(found.content)
        start, end = 0, len(whole)
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, end = int(wanted[1]), min(int(wanted[2] or end) + 1, end)
            if start >= len(whole):
                raise Refused(416, "The requested range cannot be satisfied.")
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(whole)}")
        self.send_header("X-Goog-Hash", f"crc32c={encode_crc(found.crc32c)}")
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        broken_at = self._fault.after_bytes if self._fault else None
        self.wfile.write(whole[start : end if broken_at is None else start + broken_at])
        if broken_at is not None:
            raise Broken

    def _list(self, bucket: str, query: Mapping[str, str]) -> None:
        prefix, after = query.get("prefix", ""), query.get("pageToken", "")
        with self.gcs.lock:
            names = sorted(n for b, n in self.gcs.objects if b == bucket and n.startswith(prefix) and n > after)
            page = names[: min(self.gcs.page_objects, int(query.get("maxResults") or PAGE_OBJECTS))]
            answer: dict[str, Any] = {"kind": "storage#objects", "items": [self.gcs.resource(bucket, n) for n in page]}
        if len(page) < len(names):
            answer["nextPageToken"] = page[-1]
        self._answer(200, answer)

    def _compose(self, bucket: str, name: str, query: Mapping[str, str]) -> None:
        request = json.loads(bytes(self._body()))
        sources = [str(source["name"]) for source in request["sourceObjects"]]
        if not 1 <= len(sources) <= COMPOSE_SOURCES_MAX:
            raise Refused(400, f"The number of source components provided ({len(sources)} > 32)")
        content = bytearray()
        for source in sources:
            content += self.gcs.get(bucket, source).content
        resource = request.get("destination") or {}
        self._answer(200, self.gcs.store(bucket, name, content, resource, query.get("ifGenerationMatch")))

    # ------------------------------------------------------------ uploads

    def _upload(self, bucket: str, query: Mapping[str, str]) -> None:
        match query.get("uploadType"):
            case "multipart":
                resource, content = _split(self.headers["Content-Type"], self._body())
                name = query.get("name") or str(resource["name"])
                self._answer(200, self.gcs.store(bucket, name, content, resource, query.get("ifGenerationMatch")))
            case "resumable" if "upload_id" not in query:
                self._begin(bucket, query)
            case "resumable":
                self._continue(query["upload_id"])
            case other:
                raise Refused(501, f"the fake does not know uploads of type {other}")

    def _begin(self, bucket: str, query: Mapping[str, str]) -> None:
        resource = json.loads(bytes(self._body()) or b"{}")
        name = query.get("name") or str(resource["name"])
        with self.gcs.lock:
            upload = f"upload-{len(self.gcs.sessions) + 1}"
            self.gcs.sessions[upload] = Session(bucket, name, query.get("ifGenerationMatch"), resource)
        at = f"http://{self.headers['Host']}/upload/storage/v1/b/{bucket}/o?uploadType=resumable&upload_id={upload}"
        self._answer(200, None, Location=at)

    def _continue(self, upload: str) -> None:
        session = self.gcs.sessions.get(upload)
        stated = _CONTENT_RANGE.fullmatch(self.headers.get("Content-Range") or "")
        if session is None or stated is None:
            raise Refused(404 if session is None else 400, "no such upload, or no Content-Range")
        size = int(stated[3])
        if stated[1] is not None:
            if int(stated[1]) != session.received or size > REQUEST_BYTES_MAX:
                raise Refused(503, f"expected byte {session.received}, not {stated[1]}")
            session.content = session.content or bytearray(size)
            for read in self._receive(memoryview(session.content)[session.received :]):
                session.received += read
        if session.received == size:
            self._finish(session)
        else:
            persisted = {"Range": f"bytes=0-{session.received - 1}"} if session.received else {}
            self._answer(308, None, **persisted)

    def _finish(self, session: Session) -> None:
        """Answer for a finished upload, also if a client repeats the request after a lost answer, so that nothing is
        stored twice."""
        if session.finished is None:
            session.finished = self.gcs.store(
                session.bucket, session.name, session.content, session.resource, session.precondition
            )
            session.content = bytearray()
        self._answer(200, session.finished)

    # ------------------------------------------------------------ bytes

    def _body(self) -> bytearray:
        if self._unread > REQUEST_BYTES_MAX:
            raise Refused(413, "too large for a fake")
        content = bytearray(self._unread)
        for _ in self._receive(memoryview(content)):
            pass
        return content

    def _receive(self, target: memoryview) -> Iterator[int]:
        """Read the request's body straight into `target`; yields the bytes of each piece, up to an injected fault."""
        expected = min(self._unread, len(target))
        broken_at = self._fault.after_bytes if self._fault else None
        yield from self._read(target[: expected if broken_at is None else min(broken_at, expected)])
        if broken_at is not None:
            raise Broken

    def _read(self, target: memoryview) -> Iterator[int]:
        done = 0
        while done < len(target):
            read = self.rfile.readinto(target[done : done + PIECE_BYTES])
            if not read:
                raise ConnectionResetError("the client disconnected during a body")
            done += read
            self._unread -= read
            yield read

    def _discard(self) -> None:
        """Discard the rest of a body, so that the connection can be reused."""
        buffer = memoryview(bytearray(min(self._unread, PIECE_BYTES)))
        while self._unread:
            for _ in self._read(buffer[: self._unread]):
                pass

    def _answer(self, status: int, body: Mapping[str, Any] | None, **headers: str) -> None:
        if self._fault and (self._fault.answer_lost or self._fault.after_bytes is not None):
            raise Broken
        raw = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if raw:
            self.send_header("Content-Type", "application/json")
        if status != 204:
            self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


def _split(content_type: str, body: bytearray) -> tuple[dict[str, Any], bytearray]:
    """Return the two parts of multipart/related: the object's resource and its content."""
    found = re.search(r'boundary="?([^";]+)"?', content_type)
    if found is None:
        raise Refused(400, "multipart without a boundary")
    boundary = b"--" + found[1].encode()
    _, resource, content = bytes(body).split(boundary, 2)
    content = content[: content.rindex(boundary)]
    head, tail = b"\r\n\r\n", b"\r\n"
    return json.loads(resource.partition(head)[2]), bytearray(content.partition(head)[2].removesuffix(tail))


def main() -> None:
    """`python -m holdfast.stores.fake_gcs [[HOST:]PORT]`: serve until Ctrl-C; the first line of output is the endpoint."""
    host, _, port = (sys.argv[1] if len(sys.argv) > 1 else "0").rpartition(":")
    with FakeGcs(int(port), host or "127.0.0.1") as server:
        sys.stdout.write(f"{server.endpoint}\n")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            server.stopped.wait()


if __name__ == "__main__":
    main()
