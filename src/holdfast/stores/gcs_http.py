"""Bulk transfers to and from Cloud Storage: plain HTTP/1.1 connections, directly from and into memory maps.

The client library copies every byte several times (measured in docs/adr/0011-object-store.md); `sendall` of a view and
`readinto` a view do not. The library provides credentials, endpoint and all other operations."""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from holdfast.domain.errors import HoldfastError, InvalidSpec, Unavailable
from holdfast.stores.patience import Transient

READ_BYTES = 1 << 20
IDLE_CONNECTIONS_MAX = 16
IDLE_S_MAX = 20.0  # servers close connections that are idle for longer
ERROR_BYTES_MAX = 4 << 10
RETRY_AFTER_S_MAX = 30.0

RETRIED = frozenset((408, 429, 500, 502, 503, 504))
_REFUSED = frozenset((401, 403))

Authorize = Callable[[str, str, dict[str, str]], None]  # method, URL, headers to extend


class Status(Exception):
    """A permanent error status. The caller interprets it."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(f"HTTP {status}: {why}")
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]


class Connections:
    """Persistent connections to one endpoint, for use by any number of threads."""

    def __init__(self, endpoint: str, authorize: Authorize, *, timeout_s: float) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidSpec("endpoint of the object store", endpoint, "a URL such as http://127.0.0.1:9023")
        self._secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._base = parts.path.rstrip("/")
        self._origin = f"{parts.scheme}://{parts.netloc}"
        self._authorize = authorize
        self._timeout_s = timeout_s
        self._context = ssl.create_default_context() if self._secure else None
        self._idle: list[tuple[float, http.client.HTTPConnection]] = []
        self._lock = Lock()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()

    # ------------------------------------------------------------ requests

    def send(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: Iterable[memoryview | bytes] = (),
        nbytes: int = 0,
    ) -> Answer:
        """Send a request with a body of `nbytes` and discard the answer's body. Raises Transient, Status."""
        with self._exchange(method, path, {**headers, "Content-Length": str(nbytes)}, body) as response:
            response.read()
            return Answer(response.status, dict(response.getheaders()))

    @contextmanager
    def receive(self, path: str, headers: Mapping[str, str]) -> Iterator[http.client.HTTPResponse]:
        """Send a GET; read the response with `fill`. Raises Transient, Status."""
        with self._exchange("GET", path, headers, ()) as response:
            yield response

    @contextmanager
    def _exchange(
        self, method: str, path: str, headers: Mapping[str, str], body: Iterable[memoryview | bytes]
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._take()
        reusable = False
        try:
            response = self._request(connection, method, path, dict(headers), body)
            yield response
            reusable = response.isclosed() and not response.will_close
        except HoldfastError:
            raise
        except (OSError, http.client.HTTPException) as error:
            raise Transient(f"{method} at {self._origin}: {str(error) or type(error).__name__}") from error
        finally:
            self._give_back(connection, reusable=reusable)

    def _request(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        headers: dict[str, str],
        body: Iterable[memoryview | bytes],
    ) -> http.client.HTTPResponse:
        self._authorize(method, self._origin + path, headers)
        connection.putrequest(method, self._base + path, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        whole = False
        try:
            for piece in body:
                connection.send(piece)
            whole = True
        except (BrokenPipeError, ConnectionResetError):
            # The server may have answered before the end of the body with the reason; otherwise `getresponse` raises.
            pass
        response = connection.getresponse()
        if response.status >= 400:
            raise _refusal(response)
        if not whole:
            raise Transient(f"{method} at {self._origin} was answered before it was sent")
        return response

    # ------------------------------------------------------------ connections

    def _take(self) -> http.client.HTTPConnection:
        now = time.monotonic()
        with self._lock:
            while self._idle:
                since, connection = self._idle.pop()
                if now - since <= IDLE_S_MAX:
                    return connection
                connection.close()
        return self._connect()

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._host, self._port
        tunnel = _proxy("https" if self._secure else "http", host)
        if tunnel:
            host, port = tunnel
        connection = (
            http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=self._context)
            if self._secure
            else http.client.HTTPConnection(host, port, timeout=self._timeout_s)
        )
        if tunnel:
            connection.set_tunnel(self._host, self._port)
        return connection

    def _give_back(self, connection: http.client.HTTPConnection, *, reusable: bool) -> None:
        with self._lock:
            if reusable and len(self._idle) < IDLE_CONNECTIONS_MAX:
                self._idle.append((time.monotonic(), connection))
                return
        connection.close()


def fill(response: http.client.HTTPResponse, target: memoryview) -> Iterator[int]:
    """Read the response's body directly into `target`; yields the bytes of each piece. Raises Transient if it ends early."""
    done = 0
    try:
        while done < len(target):
            read = response.readinto(target[done : done + READ_BYTES])
            if not read:
                raise Transient(f"the stream broke after {done} of {len(target)} bytes")
            done += read
            yield read
    except (OSError, http.client.HTTPException) as error:
        raise Transient(f"the stream broke after {done} bytes: {str(error) or type(error).__name__}") from error


def _refusal(response: http.client.HTTPResponse) -> Exception:
    message = response.read(ERROR_BYTES_MAX).decode(errors="replace")
    why = f"HTTP {response.status} {message[:200].strip()!r}"
    if response.status in RETRIED:
        after = response.headers.get("Retry-After") or ""
        return Transient(why, retry_after_s=min(float(after), RETRY_AFTER_S_MAX) if after.isdecimal() else 0.0)
    if response.status in _REFUSED:
        return InvalidSpec("credentials of the object store", why, "an account that may read and write its objects")
    return Status(response.status, message)


def _proxy(scheme: str, host: str) -> tuple[str, int | None] | None:
    """Return the proxy from the environment (HTTPS_PROXY, NO_PROXY), as the library does for its requests."""
    address = getproxies().get(scheme)
    if not address or proxy_bypass(host):
        return None
    parts = urlsplit(address if "//" in address else f"//{address}")
    if not parts.hostname:
        raise Unavailable(f"the proxy {address!r} that the environment names has no host")
    return parts.hostname, parts.port
