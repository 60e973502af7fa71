"""RFC 9457: every error leaves as application/problem+json, with what is wrong, where, and what would be right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Mount

from holdfast.domain.errors import Conflict, HoldfastError, InvalidSpec, InvalidSpecs, NotFound, RedisAway, Unavailable
from holdfast.supervisor.api.models import FieldProblem, Problem

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:holdfast:problem:"
REDIS_AWAY = TYPE_PREFIX + "redis-away"  # type of a 503 that waiting for a leader does not help
RETRY_AFTER_S = 1

log = structlog.get_logger("holdfast.supervisor.api")


class NotLeading(Unavailable):
    """This supervisor cannot answer because it does not lead; `leader` is where to ask, if it is known."""

    def __init__(self, message: str, leader: str = "") -> None:
        super().__init__(message)
        self.leader = leader


class Unauthorized(HoldfastError):
    """The bearer token is missing or wrong."""


class Forbidden(HoldfastError):
    """The token is valid, and not for this request."""


# What each error of ours is in HTTP; the first that fits counts.
_STATUS: tuple[tuple[type[HoldfastError], HTTPStatus], ...] = (
    (InvalidSpec, HTTPStatus.UNPROCESSABLE_ENTITY),
    (Unauthorized, HTTPStatus.UNAUTHORIZED),
    (Forbidden, HTTPStatus.FORBIDDEN),
    (NotFound, HTTPStatus.NOT_FOUND),
    (Conflict, HTTPStatus.CONFLICT),
    (Unavailable, HTTPStatus.SERVICE_UNAVAILABLE),
    (HoldfastError, HTTPStatus.INTERNAL_SERVER_ERROR),
)

RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {"model": Problem, "description": "What is wrong"},
}


def install(app: FastAPI) -> None:
    """Make `app` answer every error this way."""
    app.add_exception_handler(HoldfastError, _on_ours)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, _on_bug)
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        """FastAPI describes every answer of a route by the route's own media type; problems have another."""
        document = plain()
        for operation in (each for methods in document["paths"].values() for each in methods.values()):
            [schema] = operation["responses"]["default"]["content"].values()
            operation["responses"]["default"]["content"] = {MEDIA_TYPE: schema}
        return document

    app.openapi = openapi  # type: ignore[method-assign]


async def _on_ours(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HoldfastError)
    return response_to(error)


def response_to(error: HoldfastError) -> JSONResponse:
    status = next(status for kind, status in _STATUS if isinstance(error, kind))
    errors = [_field(each) for each in _problems(error)]
    leader = error.leader or None if isinstance(error, NotLeading) else None
    headers = {}
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if status is HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    kind = REDIS_AWAY if isinstance(error, RedisAway) else ""
    return _answer(status, str(error), errors, leader=leader, headers=headers, kind=kind)


async def _on_invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    errors = [_of_pydantic(detail) for detail in error.errors()]
    summary = "; ".join(f"{each.field}: {each.detail}" for each in errors)
    return _answer(HTTPStatus.UNPROCESSABLE_ENTITY, summary, errors)


async def on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    detail, headers = error.detail, dict(error.headers or {})
    # The dashboard's files, which come after every route, answer for a route that exists with other methods.
    methods = _methods(request) if status in {HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED} else set()
    if methods and request.method not in methods:
        status, headers = HTTPStatus.METHOD_NOT_ALLOWED, {"Allow": ", ".join(sorted(methods))}
    if status is HTTPStatus.NOT_FOUND and detail == status.phrase:
        detail = f"there is no {request.url.path} here; GET /openapi.json lists what there is"
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{request.method} is not possible on {request.url.path}"
    return _answer(status, detail, headers=headers)


def _methods(request: Request) -> set[str]:
    """Return the methods of the routes that have this path; the dashboard's mount, which has every path, is none."""
    routes = [route for route in request.app.routes if not isinstance(route, Mount)]
    scopes = {method: {**request.scope, "method": method} for method in ("DELETE", "GET", "PATCH", "POST", "PUT")}
    return {
        method for method, scope in scopes.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)
    }


async def _on_bug(request: Request, error: Exception) -> JSONResponse:
    log.error("request failed", method=request.method, path=request.url.path, exc_info=error)
    return _answer(HTTPStatus.INTERNAL_SERVER_ERROR, f"a bug in the supervisor: {error!r}; its log has the traceback")


def _answer(
    status: HTTPStatus,
    detail: str,
    errors: Sequence[FieldProblem] = (),
    *,
    leader: str | None = None,
    headers: dict[str, str] | None = None,
    kind: str = "",
) -> JSONResponse:
    """`kind`: the type of the problem, if it is not that of the status."""
    slug = status.phrase.lower().replace(" ", "-")
    problem = Problem(
        type=kind or TYPE_PREFIX + slug,
        title=status.phrase,
        status=status,
        detail=detail,
        errors=list(errors),
        leader=leader,
    )
    body = problem.model_dump(mode="json", exclude_none=True)
    if not errors:
        del body["errors"]
    return JSONResponse(body, status_code=status, media_type=MEDIA_TYPE, headers=headers)


def _problems(error: HoldfastError) -> Sequence[InvalidSpec]:
    if isinstance(error, InvalidSpecs):
        return error.problems
    return [error] if isinstance(error, InvalidSpec) else []


def _field(problem: InvalidSpec) -> FieldProblem:
    return FieldProblem(
        field=problem.field, value=_shown(problem.value), expected=problem.expected, detail=str(problem)
    )


def _of_pydantic(detail: Any) -> FieldProblem:
    """FastAPI's own complaint about a body, query or path parameter, in our words."""
    loc = [str(part) for part in detail["loc"]]
    field = ".".join(loc[1:]) or loc[0]
    value = _shown(detail.get("input"))
    match detail["type"]:
        case "missing":
            return FieldProblem(field=field, expected="a value: it is required", detail="missing; a value is required")
        case "extra_forbidden":
            expected = "no such key: it is unknown here"
        case "json_invalid":
            field, value, expected = "body", None, f"JSON ({detail.get('ctx', {}).get('error', detail['msg'])})"
        case _:
            expected = re.sub(r"^(Value error, |Input should be )", "", detail["msg"])
    return FieldProblem(
        field=field, value=value, expected=expected, detail=f"{value!r} is not valid; expected {expected}"
    )


def _shown(value: object) -> Any:
    """A wrong value as it was sent, when JSON can carry it; its text otherwise."""
    if isinstance(value, tuple):
        return [_shown(item) for item in value]
    if value is None or isinstance(value, str | int | bool | list | dict):
        return value
    return value if isinstance(value, float) and value == value and abs(value) != float("inf") else repr(value)
