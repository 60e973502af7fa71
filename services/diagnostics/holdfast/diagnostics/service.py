"""Composition root of diagnostics: creates and connects all parts, and runs them until the service is cancelled."""

from __future__ import annotations

from functools import partial

import anyio
import structlog

from holdfast.diagnostics import detectors
from holdfast.diagnostics.backlog import Backlog
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.detectors.liveness import Liveness
from holdfast.diagnostics.engine import Engine
from holdfast.diagnostics.ingest import SERVICE, TelemetryServicer
from holdfast.diagnostics.intake import Intake
from holdfast.diagnostics.plugged import plugged
from holdfast.diagnostics.publisher import Publisher
from holdfast.diagnostics.settings import DiagnosticsSettings
from holdfast.log.protocol import EventLog
from holdfast.log.redis import RedisLog
from holdfast.runtime import freeze
from holdfast.runtime.garbage import collect_seldom
from holdfast.runtime.ready import announce
from holdfast.runtime.rpc.grpc_server import listen
from holdfast.runtime.service import guarded
from holdfast.runtime.steady_clock import SteadyClock
from holdfast.runtime.telling import metrics, telemetry
from holdfast.runtime.trust.identities import Role
from holdfast.v1.telemetry_pb2_grpc import add_TelemetryServicer_to_server

log = structlog.get_logger("holdfast.diagnostics")


async def serve(settings: DiagnosticsSettings) -> None:
    """Run on Redis. Outages are waited for, also at the start."""
    collect_seldom()
    event_log = RedisLog(settings.redis_url, settings.fleet)
    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(event_log.admit)
            await run(settings, event_log)
    finally:
        with anyio.CancelScope(shield=True):
            await event_log.aclose()


async def run(settings: DiagnosticsSettings, event_log: EventLog) -> None:
    """Run on any event log until cancelled."""
    tls = settings.tls_as(Role.DIAGNOSTICS)
    catalogue = xid.load(settings.xid_overrides)
    liveness = Liveness(
        reconnect_grace_s=settings.reconnect_grace_s,
        unwitnessed_grace_s=settings.unwitnessed_grace_s,
        silence_s=settings.silence_s,
    )
    clock = SteadyClock()  # the machine's clock may be set
    publisher = Publisher(event_log, clock=clock)
    telemetry.observe(metrics.TELEMETRY_DROPPED, lambda: publisher.steps_dropped, what="steps")
    engine = Engine((*detectors.standard(catalogue, liveness=liveness), *plugged()))
    intake = Intake(engine, publisher, clock=clock)
    backlog = Backlog()
    telemetry.observe(metrics.TELEMETRY_DROPPED, lambda: backlog.dropped, what="signals")
    servicer = TelemetryServicer(intake, backlog, publisher, clock=clock)
    async with (
        anyio.create_task_group() as tasks,
        listen(
            settings.diagnostics_listen,
            lambda server: add_TelemetryServicer_to_server(servicer, server),
            services=(SERVICE,),
            tls=tls,
            membership=settings.membership,
        ) as listening,
    ):
        guarded(tasks, "freezes", partial(freeze.watch, intake.frozen))
        guarded(tasks, "backlog", backlog.fold)
        guarded(tasks, "clock", intake.watch_clock)
        guarded(tasks, "findings", publisher.publish_findings)
        guarded(tasks, "steps", publisher.publish_steps)
        announce(settings.ready_file, {"endpoint": listening.endpoint})
        log.info("serving", endpoint=listening.endpoint, xids=len(catalogue))
        await anyio.sleep_forever()
