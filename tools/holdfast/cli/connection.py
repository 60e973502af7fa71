"""A connection to one API endpoint: requests, pages, operations and events; problem+json responses are raised as exceptions.

Every POST has an Idempotency-Key, so that it can be repeated while there is no leader or after a lost answer; the supervisor
executes it once. Retries happen only in this module. `cli.client` has the methods of the API.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from typing import Any, NoReturn, Self
from urllib.parse import quote

import httpx

from holdfast.cli import api_token
from holdfast.domain.distribution import DISTRIBUTION
from holdfast.domain.errors import (
    Conflict,
    HoldfastError,
    IncompatibleVersion,
    InvalidSpec,
    InvalidSpecs,
    NotFound,
    RedisAway,
    Unavailable,
)
from holdfast.domain.hosts import PORT_MAX, is_loopback
from holdfast.runtime.trust.api_trust import API_CA, Trust, answers_with_tls

DEFAULT_API_PORT = 8470
ENV_API = "HOLDFAST_API"
ENV_LOCAL_API_PORT = "HOLDFAST_LOCAL_API_PORT"
ENV_TOKEN = "HOLDFAST_API_TOKEN"
ENV_TOKEN_FILE = "HOLDFAST_API_TOKEN_FILE"
REQUEST_TIMEOUT_S = 15.0
OPERATION_TIMEOUT_S = 60.0
OPERATION_POLL_S = 0.05
LEADER_TIMEOUT_S = 10.0  # longer than a standby needs to take over
LEADER_POLL_S = 0.1
# For the connection of the supervisors to Redis, which they try for 0.3 to 2 s in each request; with the last request.
REDIS_TIMEOUT_S, REDIS_TIMEOUT_S_MAX = 1.5, 3.0
PAGE_LIMIT = 200
HISTORY_BEHIND = "Holdfast-History-Behind"  # header of an answer from the history
TOKEN_BYTES_MAX = 16_384
QUOTED_CHARS_MAX = 200  # of an unexpected answer
PROBLEM = "application/problem+json"
REDIS_AWAY = "urn:holdfast:problem:redis-away"  # type of a problem

Json = dict[str, Any]


class Answer(dict[str, Any]):
    """An object of an answer. A field that it lacks belongs to another version of the API than that of this command."""

    def __missing__(self, key: str) -> NoReturn:
        raise IncompatibleVersion(
            f"the API has answered without {key!r}, which holdfast {version(DISTRIBUTION)} needs: the supervisor has another "
            "version (`holdfast doctor` prints which); run the command where that version is installed"
        )


def _ahead_s(response: httpx.Response) -> float:
    """How far this machine's clock is ahead of the one that has dated the answer; 0.0 if none has."""
    try:
        return time.time() - parsedate_to_datetime(response.headers["Date"]).timestamp()
    except (KeyError, ValueError):
        return 0.0


class NoApi(Unavailable):
    """The URL does not answer, or is not a Holdfast API. Not raised for a Holdfast API without a leader."""


def default_url() -> str:
    """Return HOLDFAST_API, or the address of this machine's API, with https if it speaks TLS and a CA is configured."""
    if (given := os.environ.get(ENV_API)) is not None:
        return given
    port = local_api_port()
    url = f"https://127.0.0.1:{port}"
    return url if Trust.of(os.environ).is_set and answers_with_tls(url) else f"http://127.0.0.1:{port}"


def local_api_port() -> int:
    """Return HOLDFAST_LOCAL_API_PORT, where `holdfast up` serves and commands look by default. Raises `InvalidSpec`."""
    given = os.environ.get(ENV_LOCAL_API_PORT, "")
    if not given:
        return DEFAULT_API_PORT
    if not (given.isascii() and given.isdecimal() and len(given) <= 5 and 0 < int(given) <= PORT_MAX):
        raise InvalidSpec(ENV_LOCAL_API_PORT, given, f"a port, 1 to {PORT_MAX}; unset: {DEFAULT_API_PORT}")
    return int(given)


def environment_token(environ: Mapping[str, str]) -> str:
    """Return HOLDFAST_API_TOKEN, or the content of HOLDFAST_API_TOKEN_FILE, which another program may renew. Empty if neither
    is set. Raises `InvalidSpec`."""
    if (given := environ.get(ENV_TOKEN)) or not (file := environ.get(ENV_TOKEN_FILE)):
        return given or ""
    try:
        with open(file, "rb") as opened:
            token = opened.read(TOKEN_BYTES_MAX + 1).decode("ascii").strip()
    except OSError as error:
        raise InvalidSpec(ENV_TOKEN_FILE, file, f"a file with a token that can be read ({error.strerror})") from None
    except ValueError:
        token = ""
    if not 0 < len(token) <= TOKEN_BYTES_MAX or not token.isprintable():
        raise InvalidSpec(ENV_TOKEN_FILE, file, "a file with one token, and nothing else")
    return token


class Untrusted(NoApi):
    """The certificate of the API is not accepted, or only one of the two sides speaks TLS."""


class Connection:
    """One API endpoint. Use as a context manager."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`token`: by default that of the API that this user has started on this machine, else that of the environment.

        Raises `InvalidSpec` if `url` is not an http URL, or if the file of a token, or of a CA that is named for https, cannot
        be used."""
        self.url = url.rstrip("/")
        self.history_behind = ""  # why the last answer lacks what has happened since
        self.clock_ahead_s = 0.0  # of this machine, against the sender of the last answer, to the second
        self._clock, self._sleep = clock, sleep
        host = _host(self.url)
        if token is None:
            token = (api_token.find(self.url) if is_loopback(host) else "") or environment_token(os.environ)
        self._trust = Trust.of(os.environ)
        secure = self.url.startswith("https:") and transport is None
        self._http = httpx.Client(
            base_url=self.url,
            verify=self._trust.context(httpx.create_ssl_context) if secure else True,
            timeout=REQUEST_TIMEOUT_S,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            transport=transport,
            trust_env=not is_loopback(host),  # a proxy cannot reach this machine's own loopback
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def events(self) -> Iterator[tuple[str, Json]]:
        """Yield server-sent events from now on: (type, data). Ends when the server closes the stream."""
        try:
            with self._http.stream("GET", "/v1/events", timeout=None) as response:
                self._raise_problem(response)
                kind = "message"
                for line in response.iter_lines():
                    if line.startswith("event:"):
                        kind = line[6:].strip()
                    elif line.startswith("data:"):
                        yield kind, self._event(line[5:])
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def _event(self, data: str) -> Json:
        try:
            event = json.loads(data, object_hook=Answer)
        except (ValueError, RecursionError) as error:
            raise self.not_ours("one of its events is not JSON") from error
        if not isinstance(event, dict):
            raise self.not_ours("one of its events is not a JSON object")
        return event

    def get(self, path: str, **parameters: Any) -> Json:
        return self.send("GET", path, params=parameters)

    def pages(self, path: str, **parameters: Any) -> Iterator[Json]:
        cursor: str | None = None
        while True:
            page = self.get(path, limit=PAGE_LIMIT, **parameters, **({"cursor": cursor} if cursor else {}))
            yield from page["items"]
            cursor = page.get("next_cursor")
            if not cursor:
                return

    def command(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float = OPERATION_TIMEOUT_S,
        parameters: Mapping[str, str] | None = None,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        """Send the request and wait for its operation. (202 only means that it is in the supervisor's inbox.)"""
        key = {"Idempotency-Key": uuid.uuid4().hex}
        content = {} if body is None else {"json": dict(body)}
        operation = self.send(method, path, headers={**key, **(headers or {})}, params=parameters, **content)
        deadline = self._clock() + timeout_s
        while operation.get("state") == "pending":
            if self._clock() > deadline:
                raise Unavailable(
                    f"the supervisor accepted the request but did not complete it within {timeout_s:.0f} s; it may still "
                    f"complete it (operation {operation.get('id')})"
                )
            self._sleep(OPERATION_POLL_S)
            operation = self.get(api_path("operations", str(operation["id"])))
        if operation.get("state") == "failed":
            raise HoldfastError(
                str(operation.get("reason") or "the supervisor rejected the request without a reason; see its log")
            )
        return operation

    def send(self, method: str, path: str, **options: Any) -> Json:
        """Send a request, and repeat it while there is no leader. For a GET, or a POST with an Idempotency-Key.

        Raises `RedisAway` earlier than other `Unavailable`: no leader comes as long as Redis does not answer."""
        began = self._clock()
        while True:
            asked = self._clock()
            try:
                return self._request(method, path, **options)
            except NoApi:
                raise
            except RedisAway:
                now = self._clock()
                if now - began > REDIS_TIMEOUT_S or now - began + (now - asked) > REDIS_TIMEOUT_S_MAX:
                    raise
                self._sleep(LEADER_POLL_S)
            except Unavailable:
                if self._clock() - began > LEADER_TIMEOUT_S:
                    raise
                self._sleep(LEADER_POLL_S)

    def _request(self, method: str, path: str, **options: Any) -> Json:
        try:
            response = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        self._raise_problem(response)
        self.history_behind = response.headers.get(HISTORY_BEHIND, "")
        self.clock_ahead_s = _ahead_s(response)
        try:
            answer = response.json(object_hook=Answer)
        except (ValueError, RecursionError) as error:
            raise self.not_ours("its answer is not JSON") from error
        if not isinstance(answer, dict):
            raise self.not_ours("its answer is not a JSON object")
        return answer

    def _raise_problem(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        response.read()
        problem = _problem(response)
        if problem is None:
            raise self.not_ours(f"HTTP {response.status_code}: {response.text[:QUOTED_CHARS_MAX]!r}")
        detail = str(problem.get("detail") or problem.get("title") or f"HTTP {response.status_code}")
        match response.status_code:
            case 404:
                raise NotFound(detail)
            case 409:
                raise Conflict(detail)
            case 503 if problem.get("type") == REDIS_AWAY:
                raise RedisAway(detail)
            case 503:
                raise Unavailable(detail)
            case 422 if fields := _fields(problem):
                raise fields[0] if len(fields) == 1 else InvalidSpecs(fields)
            case _:
                raise HoldfastError(detail)

    def _unreachable(self, error: httpx.TransportError) -> Unavailable:
        if refusal := self._trust.refusal(error):
            return Untrusted(f"no connection to the Holdfast API at {self.url}: {refusal}")
        if (
            isinstance(error, httpx.RemoteProtocolError | httpx.ReadError)
            and self._is_plain
            and answers_with_tls(self.url)
        ):
            secure = "https" + self.url.removeprefix("http")
            return Untrusted(
                f"{self.url} answers with TLS only; set {ENV_API}={secure} (or --api), and {API_CA} to the file with its CA"
            )
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return NoApi(
                f"no Holdfast API answers at {self.url} ({error}); "
                f"start one with `holdfast up`, or set another URL with --api or {ENV_API}"
            )
        why = "no answer in time" if isinstance(error, httpx.TimeoutException) else str(error)
        return Unavailable(
            f"the connection to the Holdfast API at {self.url} failed ({why or type(error).__name__}); try again"
        )

    @property
    def _is_plain(self) -> bool:
        return self.url.startswith("http:")

    def not_ours(self, why: str) -> NoApi:
        return NoApi(f"{self.url} is not a Holdfast API ({why}); set the correct URL with --api or {ENV_API}")


def _host(url: str) -> str:
    """Return the host of `url`. Raises `InvalidSpec` if `url` is not an http URL."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidSpec("--api", url, f"a URL such as http://127.0.0.1:{DEFAULT_API_PORT}")
    return parsed.host


def is_local(url: str) -> bool:
    """Whether only this machine reaches the URL. Raises `InvalidSpec` if it is not an http URL."""
    return is_loopback(_host(url))


def api_path(collection: str, name: str, *rest: str) -> str:
    """Return `/v1/<collection>/<name>/…`. Percent-encodes each part, so that it is always a single path segment."""
    if name in ("", ".", "..") or "/" in name:
        raise InvalidSpec(collection.removesuffix("s"), name, f"a name; `holdfast {collection} list` shows the names")
    return "/".join(("/v1", collection, *(quote(part, safe="") for part in (name, *rest))))


def _problem(response: httpx.Response) -> Json | None:
    """Return the RFC 9457 body; None if the response has none."""
    if response.headers.get("content-type", "").partition(";")[0] != PROBLEM:
        return None
    try:
        problem = response.json()
    except (ValueError, RecursionError):
        return None
    return problem if isinstance(problem, dict) else None


def _fields(problem: Json) -> list[InvalidSpec]:
    """Return the errors of a request, one per field."""
    return [
        InvalidSpec(str(each.get("field", "?")), each.get("value"), str(each.get("expected") or each.get("detail")))
        for each in problem.get("errors") or ()
        if isinstance(each, dict)
    ]
