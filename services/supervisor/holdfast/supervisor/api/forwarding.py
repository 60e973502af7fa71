"""A standby answers by asking the leader: whichever supervisor a request reaches, the answer is the leader's.

    client ──► standby ──► leader     method, path, query, body and headers as they came, the answer as it comes

`/v1/version`, `/v1/session`, `/v1/events` (each reads the same stream), `/livez`, `/readyz`, `/healthz`, the documentation and
the dashboard's files are a supervisor's own. What a standby cannot forward:

    nobody is known to lead                      503, to be asked again in a second
    the leader cannot be reached                 answered here: reads from the newest snapshot, commands through the inbox
    its address is that of another supervisor    the other one says so (`NOT_LEADING`), and it is answered here: a request is
                                                 forwarded once
    the connection breaks on the way             503: the leader may have taken it; a command with an Idempotency-Key may be
                                                 repeated
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import httpx
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from holdfast.domain.errors import InvalidSpec, Unavailable
from holdfast.runtime.files import state_of
from holdfast.runtime.trust.api_trust import Trust
from holdfast.supervisor.api import problems
from holdfast.supervisor.api.problems import NotLeading
from holdfast.supervisor.published import LeaderChanged

FORWARDED_BY = "Holdfast-Forwarded-By"  # of a request: the supervisor that it reached
NOT_LEADING = "Holdfast-Not-Leading"  # of an answer: it was forwarded to a supervisor that does not lead
OWN = frozenset({"/v1/version", "/v1/session", "/v1/events"})
CONNECT_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 60.0  # between two pieces of an answer
CONNECTIONS_MAX, KEPT_MAX = 200, 20
# Of one connection, not of the request or its answer (RFC 9110, 7.6.1), and the lengths that the next hop finds out itself.
_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
        "host",
        "content-length",
    }
)

# What `session.SignedIn` has compared with the host that the request was sent to, which is not the leader's.
_CHECKED = frozenset({"origin", "sec-fetch-site"})

log = structlog.get_logger("holdfast.supervisor.api.forwarding")


class Connections:
    """To the leader, once there is something to forward: to make them ready takes as long as a supervisor takes to lead. Never
    through a proxy of the environment. New ones use the file of the CA as it is now; those before it, with the requests on
    them, are closed when it changes once more."""

    def __init__(self, trust: Trust | None = None) -> None:
        self._trust = trust or Trust()
        self._seen: tuple[tuple[int, ...], ...] = ()
        self._client: httpx.AsyncClient | None = None
        self._before: httpx.AsyncClient | None = None

    async def client(self) -> httpx.AsyncClient:
        """Raises `InvalidSpec` if the file of the CA cannot be used."""
        if self._client is not None and ((seen := state_of(self._trust.files)) == self._seen or not all(seen)):
            return self._client
        seen = state_of(self._trust.files)
        context = self._trust.context(partial(httpx.create_ssl_context, trust_env=False))
        limits = httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=KEPT_MAX)
        made = httpx.AsyncClient(verify=context, limits=limits, trust_env=False, follow_redirects=False)
        oldest, self._before, self._client, self._seen = self._before, self._client, made, seen
        if oldest is not None:
            await oldest.aclose()
        return made

    def refusal(self, error: httpx.TransportError) -> str:
        """Why the leader's certificate is not accepted; empty if it is."""
        return self._trust.refusal(error)

    async def aclose(self) -> None:
        for each in (self._client, self._before):
            if each is not None:
                await each.aclose()


@dataclass(frozen=True, slots=True)
class Forwarding:
    """How a supervisor knows whether it leads, and who does if not."""

    supervisor: str
    api: str  # where it answers itself
    leads: Callable[[], bool]
    leader: Callable[[], Awaitable[LeaderChanged | None]]  # the newest that has been heard of
    connections: Connections
    trouble: Callable[[], str]  # why this one cannot lead; empty if it can, or is not known


class ToLeader:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, forwarding: Forwarding) -> None:
        self._app, self._forwarding = app, forwarding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        here = scope["type"] != "http" or not scope["path"].startswith("/v1/") or scope["path"] in OWN
        if here or self._forwarding.leads():
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        if by := request.headers.get(FORWARDED_BY):
            answer: Response | None = self._not_leading(by)
            body = b""
        else:
            try:
                body = await request.body()
            except ClientDisconnect:
                return
            except HTTPException as error:  # it is too large
                answer = await problems.on_http(request, error)
                await answer(scope, receive, send)
                return
            answer = await self._forward(request, body)
        if answer is None:
            await self._app(scope, _again(body, receive), send)
        else:
            await answer(scope, receive, send)

    def _not_leading(self, by: str) -> Response:
        answer = problems.response_to(
            NotLeading(f"{by} has forwarded this request to {self._forwarding.supervisor}, which does not lead")
        )
        answer.headers[NOT_LEADING] = "1"
        return answer

    async def _forward(self, request: Request, body: bytes) -> Response | None:
        """None = it is to be answered here."""
        own = self._forwarding
        leader = await own.leader()
        if leader is None or not leader.api:
            waiting = "no supervisor is known to lead yet; ask again in a second"
            return problems.response_to(NotLeading(own.trouble() or waiting))
        if leader.api.rstrip("/") == own.api.rstrip("/"):
            return None  # this one led last, and nobody has followed
        base, query = httpx.URL(leader.api), request.scope["query_string"]
        path = base.raw_path.rstrip(b"/") + request.scope["raw_path"]  # as it came: an id may have an encoded slash
        target = base.copy_with(raw_path=path + (b"?" + query if query else b""))
        left_out = _HOP | _CHECKED
        headers = [each for each in request.headers.raw if each[0].decode("latin-1").lower() not in left_out]
        headers.append((FORWARDED_BY.encode(), own.supervisor.encode()))
        timeout = httpx.Timeout(ANSWER_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        try:
            http = await own.connections.client()
            asked = http.build_request(request.method, target, headers=headers, content=body, timeout=timeout)
            answer = await http.send(asked, stream=True)
        except InvalidSpec as error:
            log.warning("the leader is not asked", leader=leader.supervisor, api=leader.api, reason=str(error))
            return None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            refusal = own.connections.refusal(error)
            say = log.warning if refusal else log.info  # of a certificate: somebody must change it
            say("the leader cannot be reached", leader=leader.supervisor, api=leader.api, reason=refusal or str(error))
            return None
        except httpx.TransportError as error:
            return problems.response_to(_broken(leader, error))
        if answer.headers.get(NOT_LEADING):
            await answer.aclose()
            return None
        passed = [(name, value) for name, value in answer.headers.multi_items() if name.lower() not in _HOP]
        response = StreamingResponse(_pieces(answer, leader), status_code=answer.status_code)
        response.raw_headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in passed]
        return response


async def _pieces(answer: httpx.Response, leader: LeaderChanged) -> AsyncIterator[bytes]:
    """As they come, and as they were encoded. An answer that breaks off breaks off for the client, too."""
    try:
        async for piece in answer.aiter_raw():
            yield piece
    except httpx.TransportError as error:
        log.warning("an answer of the leader broke off", leader=leader.supervisor, reason=str(error) or repr(error))
        raise
    finally:
        await answer.aclose()


def _broken(leader: LeaderChanged, error: httpx.TransportError) -> Unavailable:
    why = "no answer in time" if isinstance(error, httpx.TimeoutException) else str(error) or type(error).__name__
    return Unavailable(
        f"the connection to the leader {leader.supervisor} at {leader.api} failed ({why}); it may have received the request: "
        "repeat it with the same Idempotency-Key"
    )


def _again(body: bytes, receive: Receive) -> Receive:
    """What was read of the request already, for who reads it next."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
