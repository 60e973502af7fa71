"""The REST API as an ASGI application."""

from __future__ import annotations

from fastapi import FastAPI
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
from holdfast.supervisor.api.backend import Backend
from holdfast.supervisor.api.forwarding import Forwarding, ToLeader
from holdfast.supervisor.api.limits import BodyLimit

DESCRIPTION = """\
Commands answer 202 with an operation whose `url` says what became of them; send an `Idempotency-Key` to be able to repeat
one safely. Lists have cursors. Every error is `application/problem+json` (RFC 9457).
"""

ROUTERS = (
    fleet.router,
    jobs.router,
    logs.router,
    ranks.router,
    report.router,
    nodes.router,
    incidents.router,
    operations.router,
    events.router,
    audit_routes.router,
    enrolment.router,
    people.router,
    session.router,
    enrolment.joining,
    operations.health,
)


def build(backend: Backend, forwarding: Forwarding | None = None) -> FastAPI:
    """`forwarding`: how requests reach the leader; None = all are answered here."""
    app = FastAPIOffline(  # the files of /docs come from here: clusters have no way to a CDN
        title="Holdfast",
        version=backend.identity.version,
        description=DESCRIPTION,
        separate_input_output_schemas=False,
        redoc_url=None,
    )
    app.state.backend = backend
    if forwarding is not None:
        app.add_middleware(ToLeader, forwarding=forwarding)
    app.add_middleware(BodyLimit)
    app.add_middleware(session.SignedIn)
    problems.install(app)
    # not by `include_router`, which builds every route twice more, a tenth of a second each time
    for router in ROUTERS:
        app.router.routes.extend(router.routes)
    dashboard.mount(app)
    return app
