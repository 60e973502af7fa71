"""The requests to the API server of Kubernetes that the bridge needs, as the service account of this pod.

The token is read from its file for each request, because the kubelet replaces it before it expires. A request that is refused
raises `Refused` with the request and the missing right; a request without an answer raises `Unavailable`.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import anyio
import httpx

from holdfast.domain.errors import HoldfastError, InvalidSpec, MalformedMessage, NotFound, Unavailable
from holdfast.kubernetes.machines import Object

IN_CLUSTER = "https://kubernetes.default.svc"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # the directory of a pod's token
PAGE = 250  # objects in one answer; a Node with its images has 10 to 20 kB
LINE_BYTES_MAX = 4 << 20  # an object has at most 1.5 MB in etcd
REQUEST_S = 30.0
WATCH_S = 60.0  # length of a watch; the server ends it, and the next one continues where it ended
SILENCE_S = 20.0  # additional time after which a server that has not ended the watch is considered unreachable
TEXT_CHARS_MAX = 300
MERGE_PATCH = "application/merge-patch+json"


class Refused(HoldfastError):
    """The API server does not allow the request (401, 403). Repeating it helps only after a change of the rights."""


class Expired(HoldfastError):
    """The requested version is older than those that the API server keeps (410). List the objects again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Address of the API server, and credentials. `token_file`, `ca_file`: None = none, for an API server on this machine."""

    url: str = IN_CLUSTER
    token_file: Path | None = ACCOUNT / "token"
    ca_file: Path | None = ACCOUNT / "ca.crt"


@dataclass(frozen=True, slots=True)
class Resource:
    """A collection of objects. `namespace`: empty = objects of the cluster."""

    kind: str
    plural: str
    namespace: str = ""
    selector: str = ""  # by labels

    @property
    def path(self) -> str:
        return f"/api/v1/{f'namespaces/{self.namespace}/' if self.namespace else ''}{self.plural}"

    def __str__(self) -> str:
        return f"{self.plural} of namespace {self.namespace}" if self.namespace else self.plural


class Api:
    """One connection pool. `async with Api(access) as api:`; raises `InvalidSpec` if the CA cannot be read."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._client = httpx.AsyncClient(
            base_url=access.url, verify=_verification(access), timeout=REQUEST_S, trust_env=False, http2=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await self._client.aclose()

    async def list(self, resource: Resource) -> tuple[list[Object], str]:
        """Return (objects, version from which to watch). Raises `Refused`, `Expired`, `Unavailable` or `MalformedMessage`."""
        found: list[Object] = []
        query = {"limit": str(PAGE), **_selected(resource)}
        while True:
            answer = await self.request("GET", resource.path, f"list {resource}", query=query)
            items, about = answer.get("items") or [], answer.get("metadata") or {}
            if not isinstance(items, list) or not isinstance(about, dict):
                raise MalformedMessage(f"list {resource}", "the API server's answer is not a list")
            # Objects of a list do not contain their kind.
            found += [{**each, "kind": resource.kind} for each in items if isinstance(each, dict)]
            if not (more := about.get("continue")):
                return found, str(about.get("resourceVersion", ""))
            query["continue"] = str(more)

    @asynccontextmanager
    async def watch(self, resource: Resource, version: str) -> AsyncIterator[AsyncIterator[tuple[str, Object]]]:
        """Yield (type, object) of each change since `version`, until the server ends the watch. Type: ADDED, MODIFIED, DELETED,
        BOOKMARK. Raises as `list` does, `Expired` also within the watch."""
        query = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": f"{WATCH_S:.0f}",
            **_selected(resource),
        }
        what = f"watch {resource}"
        try:
            async with self._client.stream(
                "GET", resource.path, params=query, headers=await self._headers(), timeout=_patience()
            ) as answer:
                if answer.status_code != httpx.codes.OK:
                    await answer.aread()
                    raise _failure(answer, what)
                yield _events(answer, what)
        except httpx.HTTPError as error:
            raise Unavailable(self._away(what, error)) from error

    async def request(
        self,
        method: str,
        path: str,
        what: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
    ) -> dict[str, Any]:
        """Return the object in the server's answer. `what` names the request in errors. Raises `Refused`, `Expired`,
        `NotFound`, `Unavailable` or `MalformedMessage`."""
        headers = await self._headers()
        content = None
        if body is not None:
            content, headers["Content-Type"] = json.dumps(body), content_type
        try:
            answer = await self._client.request(method, path, params=query, content=content, headers=headers)
        except httpx.HTTPError as error:
            raise Unavailable(self._away(what, error)) from error
        if not answer.is_success:
            raise _failure(answer, what)
        return _object(answer.content, what)

    async def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if self._access.token_file is not None:
            try:
                token = (await anyio.Path(self._access.token_file).read_text()).strip()
            except (OSError, UnicodeDecodeError) as error:
                raise Refused(f"the token of the service account cannot be read: {error}") from error
            headers["Authorization"] = f"Bearer {token}"
        return headers

    def _away(self, what: str, error: Exception) -> str:
        return f"cannot {what}: the API server at {self._access.url} does not answer ({type(error).__name__}: {error})"


def _verification(access: Access) -> ssl.SSLContext | bool:
    if access.ca_file is None or not access.url.startswith("https:"):
        return True
    try:
        return ssl.create_default_context(cafile=str(access.ca_file))
    except OSError as error:
        expected = f"a file with the certificates of the API server's authority ({error})"
        raise InvalidSpec("HOLDFAST_KUBERNETES_CA_FILE", str(access.ca_file), expected) from error


def _patience() -> httpx.Timeout:
    return httpx.Timeout(REQUEST_S, read=WATCH_S + SILENCE_S)


def _selected(resource: Resource) -> dict[str, str]:
    return {"labelSelector": resource.selector} if resource.selector else {}


async def _events(answer: httpx.Response, what: str) -> AsyncIterator[tuple[str, Object]]:
    async for line in _lines(answer, what):
        event = _object(line, what)
        kind, found = event.get("type"), event.get("object")
        if not isinstance(kind, str) or not isinstance(found, dict):
            raise MalformedMessage(what, "an event without a type or an object")
        if kind == "ERROR":
            raise _error(int(found.get("code") or 0), str(found.get("message", "")), what)
        yield kind, found


async def _lines(answer: httpx.Response, what: str) -> AsyncIterator[bytes]:
    kept = bytearray()
    async for part in answer.aiter_bytes():
        kept += part
        *whole, rest = kept.split(b"\n")
        if len(rest) > LINE_BYTES_MAX:
            raise MalformedMessage(what, f"an event of more than {LINE_BYTES_MAX} bytes")
        kept = bytearray(rest)
        for line in whole:
            if line.strip():
                yield bytes(line)


def _object(content: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MalformedMessage(what, f"the API server's answer is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise MalformedMessage(what, "the API server's answer is not an object")
    return found


def _failure(answer: httpx.Response, what: str) -> HoldfastError:
    try:
        message = str(_object(answer.content, what).get("message", ""))
    except MalformedMessage:
        message = answer.reason_phrase
    return _error(answer.status_code, message, what)


def _error(code: int, message: str, what: str) -> HoldfastError:
    detail = " ".join(message.split())[:TEXT_CHARS_MAX]
    match code:
        case 401:
            return Refused(f"may not {what}: the API server does not accept the token ({detail})")
        case 403:
            return Refused(f"may not {what}: the service account has no right to ({detail})")
        case 404:
            return NotFound(f"cannot {what}: {detail or 'not found'}")
        case 410:
            return Expired(f"cannot {what}: {detail}")
        case _:
            return Unavailable(f"cannot {what}: the API server answered {code} ({detail})")
