"""Sign-in of browsers: `/v1/session` exchanges the API token for a cookie that scripts cannot read.

Theory. For HOLDFAST_API_TOKEN the cookie is `expiry.nonce.mac`; the key of its HMAC-SHA256 is the token. So no supervisor keeps
sessions: each of a fleet accepts what another has given out, a restart ends none, and another token ends all. Of a token with a
role the supervisors have a digest only, with which whoever reads their file must not be able to sign: its cookie is
`expiry.token`. So is that of a token of an OpenID Connect issuer, which is checked again with each request. `SignedIn` puts the
token's own header on a request with a valid cookie; what authorizes requests (`access.authorize`, at the leader as well) knows
nothing of cookies.

A browser sends the cookie by itself, and an API without a token asks for none. So a request that changes something without the
header `Authorization` must come from a page of this API, or from no page: its `Origin` names the host that it was sent to.
`SameSite=Strict` says the same to browsers that keep it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Iterable
from http.cookies import CookieError, SimpleCookie
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Request, Response
from pydantic import Field
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from holdfast.domain.errors import InvalidSpec
from holdfast.runtime.trust import oidc
from holdfast.runtime.trust.api_tokens import PREFIX, ApiRole
from holdfast.supervisor.api import problems
from holdfast.supervisor.api.access import identified
from holdfast.supervisor.api.backend import Backend, Serving
from holdfast.supervisor.api.models import Model
from holdfast.supervisor.api.problems import Forbidden, Unauthorized

COOKIE = "holdfast_session"
LASTS_S = 12 * 3600
TOKEN_CHARS_MAX = 3800  # of a token in a cookie: browsers keep 4096 bytes, with its name and attributes
_SAFE = ("GET", "HEAD", "OPTIONS")

router = APIRouter(prefix="/v1/session", tags=["session"], responses=problems.RESPONSES)


class SignIn(Model):
    token: Annotated[
        str,
        Field(
            min_length=1,
            max_length=oidc.TOKEN_CHARS_MAX,
            description="HOLDFAST_API_TOKEN, a token with a role, or one of the OIDC issuer",
        ),
    ]


class Session(Model):
    """Who asks, as far as this API knows."""

    required: Annotated[bool, Field(description="whether this API has tokens: without one nobody has to sign in")]
    signed_in: Annotated[bool, Field(description="by a cookie, or by the header `Authorization`")]
    until: Annotated[float | None, Field(description="end of the cookie's session, Unix seconds; null: there is none")]
    name: Annotated[str, Field(description="of the token; empty: nobody has signed in, or nobody has to")]
    role: Annotated[ApiRole | None, Field(description="null: nobody has signed in")]


# ---------------------------------------------------------------- the cookie


def issue(token: str, until: float) -> str:
    """A session that ends at `until` (Unix seconds)."""
    text = f"{int(until)}.{secrets.token_hex(16)}"
    return f"{text}.{_mac(token, text)}"


def token_of(cookie: str, tokens: Iterable[str], now: float) -> tuple[str, float] | None:
    """The token that `cookie` stands for and the end of the session (Unix seconds); None for one that is over, or not ours.
    Whether a token with a role, or of an issuer, is valid is decided where requests are authorized."""
    until, _, rest = cookie.partition(".")
    if not (until.isascii() and until.isdecimal() and len(until) < 12) or int(until) <= now:
        return None
    if rest.startswith(PREFIX) or oidc.is_token(rest):
        return rest, float(until)
    text, _, mac = cookie.rpartition(".")
    for token in tokens:
        if token and hmac.compare_digest(_mac(token, text).encode(), mac.encode()):
            return token, float(until)
    return None


def _mac(token: str, text: str) -> str:
    return hmac.new(token.encode(), f"holdfast session {text}".encode(), hashlib.sha256).hexdigest()


# ---------------------------------------------------------------- requests with one


class SignedIn:
    """ASGI middleware, outside of all that authorizes. Requests with the header `Authorization` pass as they are."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["type"] != "http" or not scope["path"].startswith("/v1/") or "authorization" in headers:
            await self._app(scope, receive, send)
            return
        if scope["method"] not in _SAFE and not _same_origin(headers):
            answer = await problems.on_http(Request(scope), HTTPException(403, _refusal(headers)))
            await answer(scope, receive, send)
            return
        backend: Backend = scope["app"].state.backend
        cookie = _cookie(headers)
        if cookie and (found := token_of(cookie, tokens_of(backend), time.time())) is not None:
            scope = dict(scope, headers=list(scope["headers"]))
            MutableHeaders(scope=scope)["Authorization"] = f"Bearer {found[0]}"
        await self._app(scope, receive, send)


def tokens_of(backend: Backend) -> tuple[str, ...]:
    """The tokens that supervisors know as such, which may sign in besides those with roles."""
    return (backend.identity.token,) if backend.identity.token else ()


def _cookie(headers: Headers) -> str:
    try:
        jar = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return jar[COOKIE].value if COOKIE in jar else ""


def _same_origin(headers: Headers) -> bool:
    """Whether a request comes from a page of this host, or from no page. Without `Origin` no browser has sent it, but for old
    ones, which `Sec-Fetch-Site` is missing from as well."""
    origin = headers.get("origin")
    if origin is None:
        return headers.get("sec-fetch-site", "none") in ("none", "same-origin")
    try:
        return urlsplit(origin).netloc == headers.get("host", "")
    except ValueError:  # a bracket without its counterpart: no browser has sent it
        return False


def _refusal(headers: Headers) -> str:
    return (
        f"a page of {headers.get('origin') or 'another site'} has sent this request; without the header Authorization only "
        f"pages of {headers.get('host', 'this host')} may change something. A proxy in front must pass the header Host on"
    )


# ---------------------------------------------------------------- sign in, look, sign out


@router.post("")
async def sign_in(body: SignIn, request: Request, response: Response, backend: Serving) -> Session:
    """Exchange a token for a cookie that this browser sends from now on: until the token expires, and for 12 hours at most. 401
    for a wrong token."""
    if not _has_tokens(backend):
        return await _session(backend, "")
    now = time.time()
    try:
        principal = await identified(backend, body.token, now)
    except Unauthorized as error:
        if backend.identity.oidc is not None and oidc.is_token(body.token):
            raise  # says what is wrong with it
        raise Unauthorized(
            "no such token: give HOLDFAST_API_TOKEN, or a token of `holdfast tokens create`"
            + (f", or of {backend.identity.oidc.rules.issuer}" if backend.identity.oidc is not None else "")
        ) from error
    until = min(now + LASTS_S, principal.expires_at or now + LASTS_S)
    is_own = any(secrets.compare_digest(each.encode(), body.token.encode()) for each in tokens_of(backend))
    if not is_own and len(body.token) > TOKEN_CHARS_MAX:
        expected = f"a token of at most {TOKEN_CHARS_MAX} characters, to fit into a cookie"
        raise InvalidSpec("token", f"{len(body.token)} characters", expected)
    response.set_cookie(
        COOKIE,
        issue(body.token, until) if is_own else f"{int(until)}.{body.token}",
        max_age=max(1, int(until - now)),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )
    return await _session(backend, body.token, float(int(until)))


@router.get("")
async def look(request: Request, backend: Serving) -> Session:
    """Whether a token is needed, and whose this request brings. Answers without one."""
    found = token_of(_cookie(request.headers), tokens_of(backend), time.time())
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    return await _session(backend, given or (found[0] if found else ""), found[1] if found else None)


@router.delete("")
async def sign_out(request: Request, response: Response, backend: Serving) -> Session:
    """Delete the cookie of this browser. Copies of it are valid until they end, or until its token is not valid any more."""
    response.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=request.url.scheme == "https")
    return await _session(backend, "")


async def _session(backend: Backend, token: str, until: float | None = None) -> Session:
    required = _has_tokens(backend)
    try:
        principal = await identified(backend, token, time.time())
    except (Unauthorized, Forbidden):
        return Session(required=required, signed_in=False, until=None, name="", role=None)
    return Session(required=required, signed_in=True, until=until, name=principal.name, role=principal.role)


def _has_tokens(backend: Backend) -> bool:
    return not backend.identity.is_open
