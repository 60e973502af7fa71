"""`/v1/operations`, `/v1/breaker`, `/v1/kubernetes`, `/v1/version`, and three questions that orchestrators and monitors ask:

/livez      must this process be started again?    no, while it answers at all: a start does not mend Redis
/readyz     should requests be sent here?          while Redis answers, and there is a state to show
/healthz    are faults acted on?                   while this supervisor, or another one, leads; otherwise the reason
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

from fastapi import APIRouter

from holdfast.domain.errors import Unavailable
from holdfast.domain.nodes import PROTOCOL_VERSION
from holdfast.supervisor.alerts.alert import test_alert
from holdfast.supervisor.api import bodies, fleet_views, models
from holdfast.supervisor.api.access import guarded
from holdfast.supervisor.api.backend import Commands, Serving
from holdfast.supervisor.api.problems import RESPONSES, NotLeading
from holdfast.supervisor.picture import Standby
from holdfast.supervisor.protocol import BreakerResetRequested

T = TypeVar("T")

router = guarded("/v1", tags=["operations"])
health = APIRouter(tags=["health"], responses=RESPONSES)


@router.get("/operations/{operation}")
async def get_operation(operation: str, backend: Serving) -> models.Operation:
    """What became of an accepted request."""
    return await backend.operation(operation)


@router.get("/breaker")
async def get_breaker(backend: Serving) -> models.Breaker:
    """Whether faults are acted on, and what has happened within the breaker's window until now."""
    return fleet_views.breaker((await backend.picture()).state, backend.now())


@router.post("/breaker/reset", status_code=202)
async def reset_breaker(commands: Commands, body: bodies.ReasonBody | None = None) -> models.Operation:
    """An operator has looked: act on faults again."""
    reason = (body or bodies.ReasonBody()).reason
    return await commands.command(BreakerResetRequested(time.time(), reason))


@router.post("/alerts/test")
async def test_alerts(backend: Serving) -> models.AlertsTested:
    """Send a test alert to every address now. It is not repeated."""
    if not backend.alerts:
        return models.AlertsTested(addresses=[])
    outcome = await backend.alerts.test(test_alert(time.time(), backend.identity.supervisor))
    return models.AlertsTested(
        addresses=[
            models.AlertAddress(address=name, sent=not problem, problem=problem) for name, problem in outcome.items()
        ]
    )


@router.get("/kubernetes")
async def get_kubernetes(backend: Serving) -> models.Kubernetes:
    """Whether the cluster of the machines is watched, and what keeps it from being seen."""
    if backend.cluster is None:
        return models.Kubernetes(watch=False, watched=[])
    return models.Kubernetes(watch=True, watched=[models.WatchedObjects.of(each) for each in backend.cluster()])


@router.get("/version")
async def version(backend: Serving) -> models.Version:
    picture = await backend.picture()
    leader = await backend.history.leader()
    standby = await _if_known(backend.standby, Standby())
    return models.Version(
        version=backend.identity.version,
        protocol_version=PROTOCOL_VERSION,
        supervisor=backend.identity.supervisor,
        leader=picture.leading,
        leader_api=leader.api if leader else "",
        trouble=backend.trouble(),
        standby_api=standby.api,
        standby_version=standby.version,
        epoch=picture.state.epoch,
        event_log=await _if_known(backend.log.lifetime, ""),
    )


async def _if_known(ask: Callable[[], Awaitable[T]], otherwise: T) -> T:
    try:
        return await ask()
    except Unavailable:
        return otherwise  # the rest is known without it


@health.head("/livez", include_in_schema=False)
@health.get("/livez")
async def livez() -> Literal["ok"]:
    """200 while this process answers, whatever Redis does: for a probe that starts the process again."""
    return "ok"


@health.head("/readyz", include_in_schema=False)
@health.get("/readyz")
async def readyz(backend: Serving) -> models.Health:
    """200 while Redis answers and there is a state to show, also if nobody leads: for a load balancer. 503 with the reason
    otherwise."""
    await backend.log.ping()
    return models.Health(status="ok", leader=(await backend.picture()).leading)


@health.head("/healthz", include_in_schema=False)
@health.get("/healthz")
async def healthz(backend: Serving) -> models.Health:
    """200 while faults are acted on, by this supervisor or another one: for a monitor. 503 with the reason otherwise; training
    continues."""
    health = await readyz(backend)
    if trouble := backend.trouble():
        raise NotLeading(trouble)
    return health
