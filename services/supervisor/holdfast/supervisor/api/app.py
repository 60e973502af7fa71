"""The REST API as an ASGI application."""

from __future__ import annotations

from fastapi import APIRouter, Depends, FastAPI
from fastapi_offline import FastAPIOffline

from holdfast.supervisor.api import (
    audit_routes,
    dashboard,
    enrolment,
    events,
    fleet,
    incidents,
    jobs,
    logs,
    nodes,
    operations,
    people,
    problems,
    ranks,
    report,
    session,
)
from holdfast.supervisor.api.access import authorize
from holdfast.supervisor.api.backend import Backend
from holdfast.supervisor.api.forwarding import Forwarding, ToLeader
from holdfast.supervisor.api.limits import BodyLimit

DESCRIPTION = """\
Commands answer 202 with an operation whose `url` says what became of them; send an `Idempotency-Key` to be able to repeat
one safely. Lists have cursors. Every error is `application/problem+json` (RFC 9457).
"""


def build(backend: Backend, forwarding: Forwarding | None = None) -> FastAPI:
    """`forwarding`: how requests reach the leader; None = all are answered here."""
    app = FastAPIOffline(  # the files of /docs come from here: clusters have no way to a CDN
        title="Holdfast",
        version=backend.identity.version,
        description=DESCRIPTION,
        separate_input_output_schemas=False,
        responses=problems.RESPONSES,
        redoc_url=None,
    )
    app.state.backend = backend
    if forwarding is not None:
        app.add_middleware(ToLeader, forwarding=forwarding)
    app.add_middleware(BodyLimit)
    app.add_middleware(session.SignedIn)
    problems.install(app)
    v1 = APIRouter(prefix="/v1", dependencies=[Depends(authorize)])
    for part in (
        fleet,
        jobs,
        logs,
        ranks,
        report,
        nodes,
        incidents,
        operations,
        events,
        audit_routes,
        enrolment,
        people,
    ):
        v1.include_router(part.router)
    app.include_router(v1)
    app.include_router(session.router, prefix="/v1")
    app.include_router(enrolment.joining, prefix="/v1")
    app.include_router(operations.health)
    dashboard.mount(app)
    return app
