"""Who may ask the REST API for what: one table of routes and roles, and the decision on one request.

    Authorization: Bearer TOKEN ──► principal (name, role) ──► row of the route ──► owner of the job, if the row asks for it

A route without a row is refused. `HOLDFAST_API_TOKEN` is the token of the principal `admin`; the others are in
`HOLDFAST_API_TOKENS_FILE`, or signed by the issuer in `HOLDFAST_API_OIDC_ISSUER`. Without any, everybody who reaches the API is
an admin.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Annotated

import structlog
from fastapi import APIRouter, Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from holdfast.domain.errors import Unavailable
from holdfast.runtime.trust import oidc
from holdfast.runtime.trust.api_tokens import ApiRole
from holdfast.supervisor.api.backend import Backend, Identity, Principal, Serving
from holdfast.supervisor.api.problems import RESPONSES, Forbidden, Unauthorized

ADMIN = "admin"  # principal of HOLDFAST_API_TOKEN
log = structlog.get_logger("holdfast.supervisor.api.access")
_bearer = HTTPBearer(
    auto_error=False,
    description="HOLDFAST_API_TOKEN, a token of `holdfast tokens create`, or one of the OIDC issuer.",
)


@dataclass(frozen=True, slots=True)
class RouteRule:
    """`own_job`: a submitter may ask for its own jobs only."""

    role: ApiRole
    own_job: bool = False


_READ = RouteRule(ApiRole.VIEWER)
_SUBMIT = RouteRule(ApiRole.SUBMITTER)
_OWN = RouteRule(ApiRole.SUBMITTER, own_job=True)
_OPERATE = RouteRule(ApiRole.OPERATOR)
_ADMINISTER = RouteRule(ApiRole.ADMIN)

ROUTES: Mapping[str, RouteRule] = MappingProxyType(
    {
        "GET /v1/jobs": _READ,
        "POST /v1/jobs": _SUBMIT,  # whose name it is: `may_take`
        "GET /v1/jobs/{name}": _READ,
        "DELETE /v1/jobs/{name}": _OWN,
        "POST /v1/jobs/{name}/stop": _OWN,
        "POST /v1/jobs/{name}/resume": _OWN,
        "POST /v1/jobs/{name}/attach": _OWN,
        "POST /v1/jobs/{name}/checkpoint": _OWN,
        "POST /v1/jobs/{name}/resize": _OWN,
        "GET /v1/jobs/{name}/checkpoints": _READ,
        "GET /v1/jobs/{name}/checkpoints/{attempt}/{step}": _READ,
        "GET /v1/jobs/{name}/checkpoints/{attempt}/{step}/sources": _OWN,  # has the job's secret
        "POST /v1/jobs/{name}/checkpoints/prune": _OWN,
        "GET /v1/jobs/{name}/policy": _READ,
        "POST /v1/jobs/{name}/policy": _OWN,
        "GET /v1/jobs/{name}/policy/questions": _READ,
        "POST /v1/jobs/{name}/faults": _OPERATE,  # they strike nodes and the control plane
        "GET /v1/jobs/{name}/goodput": _READ,
        "GET /v1/jobs/{name}/ranks": _READ,
        "GET /v1/jobs/{name}/ranks/measurements": _READ,
        "GET /v1/jobs/{name}/errors": _READ,
        "GET /v1/jobs/{name}/ranks/{rank}/log": _READ,
        "GET /v1/jobs/{name}/timeline": _READ,
        "GET /v1/jobs/{name}/report": _READ,
        "GET /v1/report": _READ,
        "GET /v1/fleet": _READ,
        "GET /v1/fleet/checkpoints": _READ,
        "GET /v1/fleet/nodes": _READ,
        "GET /v1/nodes": _READ,
        "GET /v1/nodes/{name}": _READ,
        "GET /v1/nodes/{name}/gpus": _READ,
        "POST /v1/nodes/{name}/cordon": _OPERATE,
        "POST /v1/nodes/{name}/uncordon": _OPERATE,
        "POST /v1/nodes/{name}/restart-agent": _OPERATE,
        "PUT /v1/nodes/{name}/notices/{source}": _OPERATE,
        "DELETE /v1/nodes/{name}/notices/{source}": _OPERATE,
        "POST /v1/nodes/{name}/repair": _OPERATE,
        "GET /v1/incidents": _READ,
        "GET /v1/incidents/{incident_id}": _READ,
        "GET /v1/incidents/{incident_id}/trace": _READ,
        "GET /v1/findings": _READ,
        "GET /v1/findings/{finding_id}": _READ,
        "GET /v1/actions": _READ,
        "GET /v1/operations/{operation}": _READ,
        "GET /v1/breaker": _READ,
        "POST /v1/breaker/reset": _OPERATE,
        "POST /v1/alerts/test": _OPERATE,
        "GET /v1/kubernetes": _READ,
        "GET /v1/people": _OPERATE,
        "GET /v1/version": _READ,
        "GET /v1/events": _READ,
        "GET /v1/audit": _OPERATE,
        "GET /v1/invites": _ADMINISTER,
        "POST /v1/invites": _ADMINISTER,  # whoever has one can make a machine a node
        "DELETE /v1/invites/{invite}": _ADMINISTER,
    }
)


async def authorize(
    request: Request,
    backend: Serving,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)] = None,
) -> Principal:
    """Return who asks. Raises `Unauthorized` without a valid token where one is needed, and `Forbidden` for a route that is not
    for the token's role, or for the job of somebody else. Raises `Unavailable` if a token cannot be checked now."""
    token = credentials.credentials if credentials else ""
    principal = await identified(backend, token, time.time())
    request.state.principal, request.state.token = principal, token
    route = route_of(request)
    if refusal := refused(principal, route):
        raise _logged(Forbidden(refusal), principal, request)
    if ROUTES[route].own_job and not principal.role.may(ApiRole.OPERATOR):
        await require_own(backend, principal, str(request.path_params["name"]), request)
    return principal


Asking = Annotated[Principal, Depends(authorize)]


def guarded(prefix: str, *, tags: list[str | Enum]) -> APIRouter:
    """Return a router whose routes `authorize` those who ask; each needs a row in the table."""
    return APIRouter(prefix=prefix, tags=tags, dependencies=[Depends(authorize)], responses=RESPONSES)


def route_of(request: Request) -> str:
    """Return the request's row in the table."""
    return f"{request.method} {request.scope['route'].path_format}"


async def identified(backend: Backend, token: str, now: float) -> Principal:
    """As `identify`, with the keys of the issuer fetched if they are needed."""
    known = backend.identity
    if known.oidc is not None and oidc.is_token(token) and _by_own(known, token, now) is None:
        await known.oidc.prepare(token)
    return identify(backend, token, now)


def identify(backend: Backend, token: str, now: float) -> Principal:
    """Raises `Unauthorized`; `Forbidden` for a valid token that gives no role; `Unavailable` without keys of the issuer."""
    known = backend.identity
    if known.is_open:
        return Principal("", ApiRole.ADMIN)
    if (own := _by_own(known, token, now)) is not None:
        return own
    if known.oidc is not None and oidc.is_token(token):
        return _by_issuer(known.oidc, token, now)
    kinds = [
        "its HOLDFAST_API_TOKEN (`holdfast up` makes one, which only commands of its own user find)",
        "a token of `holdfast tokens create` that is neither expired nor revoked",
        *([f"a token of {known.oidc.rules.issuer}"] if known.oidc is not None else []),
    ]
    raise Unauthorized(f"this API wants the header `Authorization: Bearer <token>` with {', or with '.join(kinds)}")


def _by_own(known: Identity, token: str, now: float) -> Principal | None:
    """Whose a token is that this API has been given itself."""
    if known.token and secrets.compare_digest(token.encode(), known.token.encode()):
        return Principal(ADMIN, ApiRole.ADMIN)
    if token and known.tokens is not None and (found := known.tokens.find(token, now)) is not None:
        return Principal(found.name, found.role, found.expires_at)
    return None


def _by_issuer(tokens: oidc.OidcTokens, token: str, now: float) -> Principal:
    try:
        person = tokens.find(token, now)
    except oidc.InvalidToken as error:
        raise Unauthorized(f"this token of {tokens.rules.issuer} is not accepted: {error}") from None
    if person.role is None:
        raise Forbidden(f"no rule in {oidc.ROLES} gives {person.name} a role")
    return Principal(person.name, person.role, person.expires_at)


def watching(request: Request, backend: Serving) -> Callable[[], bool]:
    """Return what says whether who asked may still read an answer that goes on: not with a token that has expired or was
    revoked, or that gives no role any more."""
    token, route = str(request.state.token), route_of(request)

    def may_go_on() -> bool:
        try:
            return not refused(identify(backend, token, time.time()), route)
        except (Unauthorized, Forbidden, Unavailable):
            return False

    return may_go_on


Watching = Annotated[Callable[[], bool], Depends(watching)]


def refused(principal: Principal, route: str, routes: Mapping[str, RouteRule] = ROUTES) -> str:
    """Return why a role may not ask for a route, whatever it is about; empty if it may."""
    rule = routes.get(route)
    if rule is None:
        return f"{route} is not in the table of access: nobody may ask for it"
    if not principal.role.may(rule.role):
        return f"this request is for role {rule.role} and above, and {principal.name} has role {principal.role}"
    return ""


async def require_own(backend: Backend, principal: Principal, job: str, request: Request) -> None:
    """Raises `Forbidden` for a job that somebody else has submitted, if the principal has no role for all jobs."""
    if principal.role.may(ApiRole.OPERATOR):
        return
    known = (await backend.picture()).state.jobs.get(job)
    if known is not None and known.owner != principal.name:
        owner = known.owner or "somebody without a token of their own"
        reason = (
            f"job {job} was submitted by {owner}; {principal.name} has role {principal.role}, for its own jobs only"
        )
        raise _logged(Forbidden(reason), principal, request)


def _logged(refusal: Forbidden, principal: Principal, request: Request) -> Forbidden:
    log.warning(
        "request refused", who=principal.name, method=request.method, path=request.url.path, reason=str(refusal)
    )
    return refusal
