"""The composition root of the supervisor: creates and connects all parts, and runs until the service is cancelled."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from functools import partial
from importlib.metadata import version
from ipaddress import ip_address

import anyio
import grpc
import structlog

from holdfast.domain.distribution import DISTRIBUTION
from holdfast.domain.errors import Unavailable
from holdfast.kubernetes.bridge import Bridge
from holdfast.log.protocol import FencedLog
from holdfast.log.redis import RedisLog
from holdfast.runtime import freeze
from holdfast.runtime.garbage import collect_seldom
from holdfast.runtime.ready import announce
from holdfast.runtime.rpc.grpc_server import listen
from holdfast.runtime.service import guarded
from holdfast.runtime.telling import telemetry
from holdfast.runtime.trust.api_tokens import TOKENS_FILE, TokensFile
from holdfast.runtime.trust.identities import Role
from holdfast.runtime.trust.oidc import ISSUER
from holdfast.supervisor import providers
from holdfast.supervisor.agents.control import SERVICE, ControlServicer, add_to_server
from holdfast.supervisor.alerts import outage
from holdfast.supervisor.alerts.sender import Alerts
from holdfast.supervisor.alerts.targets import Webhook, notifiers
from holdfast.supervisor.api.app import build
from holdfast.supervisor.api.audit_store import AuditStore
from holdfast.supervisor.api.backend import Backend, Identity
from holdfast.supervisor.api.forwarding import Connections, Forwarding
from holdfast.supervisor.api.server import bind, serving, url_of
from holdfast.supervisor.enrolment import Enrolment, EnrolmentServicer, issuer_of
from holdfast.supervisor.history.follower import Follower
from holdfast.supervisor.history.sqlite import SqliteHistory
from holdfast.supervisor.inbox import InboxEvent
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.leader.campaign import Leader
from holdfast.supervisor.leader.own_faults import OwnFaults
from holdfast.supervisor.leader.term import LeaseTimes, Parts
from holdfast.supervisor.leader.viewer import Viewer
from holdfast.supervisor.picture import Progress
from holdfast.supervisor.policies.runner import PolicyRunner
from holdfast.supervisor.policies.sandbox import missing
from holdfast.supervisor.published import Published
from holdfast.supervisor.settings import SupervisorSettings
from holdfast.supervisor.telemetry.log_memory import Room
from holdfast.supervisor.telemetry.meters import Meters
from holdfast.v1.enrolment_pb2_grpc import add_EnrolmentServicer_to_server
from holdfast.wire import records

PICTURE_POLL_S = 0.01
HISTORY_TIMEOUT_S = 10.0  # a supervisor whose history is further behind leads nevertheless

log = structlog.get_logger("holdfast.supervisor")


async def serve(settings: SupervisorSettings) -> None:
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


async def run(settings: SupervisorSettings, event_log: FencedLog, *, times: LeaseTimes | None = None) -> None:
    """Run on any event log until cancelled."""
    snapshot.prepare()
    records.prepare(Published, InboxEvent)
    issuer = issuer_of(settings.ca_dir, settings.fleet, settings.tls, settings.node_certificate_s)
    tls = settings.tls_as(Role.SUPERVISOR)
    tokens = TokensFile(settings.api_tokens_file) if settings.api_tokens_file is not None else None
    oidc = settings.api_oidc
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(bind(settings.api_listen))
        certificate, host = settings.api_certificate(listener)
        api_tls = certificate.context() if certificate is not None else None
        api_url = settings.api_url or url_of(listener, host, secure=api_tls is not None)
        history = await SqliteHistory.open(settings.data_dir / "history.sqlite3")
        stack.push_async_callback(history.aclose)
        if without := missing():
            log.warning(
                "policies are not confined", reason=f"this kernel does not keep them from {' and '.join(without)}"
            )
        requests = await AuditStore.open(settings.data_dir / "audit.sqlite3")
        stack.push_async_callback(requests.aclose)
        policies = PolicyRunner()
        stack.push_async_callback(policies.aclose)
        progress = Progress()
        follower = Follower(event_log, history, progress)
        provider = providers.build(settings.provider, settings.replace_command, settings.replacer)
        bridge = Bridge(settings.bridge, time.time) if settings.kubernetes_watch else None
        parts = Parts(
            event_log=event_log,
            history=history,
            policies=policies,
            clock=time.time,
            supervisor=settings.supervisor_name,
            api=api_url,
            times=times or LeaseTimes(),
            returns=settings.returns,
            replacements=settings.replacements,
            links=settings.links,
            offenders=settings.offenders,
            provider=provider,
            supplier=providers.supplier(provider, settings.more_command, settings.more_nodes_max),
            demand=settings.demand,
            own_faults=OwnFaults(
                settings.own_faults, event_log, event_log.server if isinstance(event_log, RedisLog) else None
            ),
            bridge=bridge,
        )
        leader = Leader(parts)
        control = ControlServicer(
            leader.sessions,
            supervisor=settings.supervisor_name,
            diagnostics=settings.diagnostics_endpoints,
            clock=time.time,
        )
        link = settings.alert_link or api_url
        webhook = partial(
            Webhook, secret=settings.alert_secret.get_secret_value(), source=f"/holdfast/{settings.fleet}", link=link
        )
        alerts = Alerts(
            event_log,
            notifiers(settings.alert_addresses, webhook),
            settings.alerts_about,
            consumer=settings.supervisor_name,
        )
        room = Room(event_log)

        def trouble() -> str:
            return leader.trouble or room.trouble

        viewer = Viewer(leader.picture, event_log, trouble)
        backend = Backend(
            identity=Identity(
                settings.supervisor_name, version(DISTRIBUTION), settings.api_token.get_secret_value(), tokens, oidc
            ),
            log=event_log,
            history=history,
            look=viewer.look,
            progress=progress,
            policies=policies,
            cluster=bridge.sights if bridge is not None else None,
            alerts=alerts,
            audit=requests,
            agents=leader.agents,
            standby=leader.standby,
            trouble=trouble,
            behind=lambda: follower.trouble,
            now=leader.now,
        )
        tasks = await stack.enter_async_context(anyio.create_task_group())
        guarded(tasks, "freezes", partial(freeze.watch, leader.frozen))
        guarded(tasks, "history of events", follower.follow_events)
        guarded(tasks, "history of steps", follower.follow_steps)
        guarded(tasks, "events for readers", backend.events.run)
        guarded(tasks, "room", room.watch)
        if oidc is not None:
            guarded(tasks, "keys of the OIDC issuer", oidc.keys.keep)
        if alerts:
            guarded(tasks, "alerts", alerts.run)
            guarded(tasks, "outages", partial(outage.watch, settings.supervisor_name, trouble, alerts))
        if telemetry.on():
            guarded(tasks, "metrics", Meters(leader.picture, event_log, history, progress).run)

        def register(server: grpc.aio.Server) -> None:
            add_to_server(control, server)
            add_EnrolmentServicer_to_server(EnrolmentServicer(issuer), server)

        listening = await stack.enter_async_context(
            listen(
                settings.supervisor_listen,
                register,
                services=(SERVICE,),
                tls=tls,
                membership=settings.membership,
            )
        )
        if issuer is not None:
            backend.enrolment = Enrolment(issuer, settings.membership, listening.port)
        connections = Connections(settings.api_trust)
        stack.push_async_callback(connections.aclose)
        forwarding = Forwarding(
            supervisor=settings.supervisor_name,
            api=api_url,
            leads=lambda: leader.picture() is not None,
            leader=history.leader,
            connections=connections,
            trouble=trouble,
        )
        await stack.enter_async_context(serving(build(backend, forwarding), listener, api_tls))
        # The history contains the answered requests: a leader looks there before it folds a request.
        with anyio.move_on_after(HISTORY_TIMEOUT_S):
            await follower.caught_up.wait()
        # Entered last and left first: a supervisor that stops releases the lease before it ends its sessions.
        leading = await stack.enter_async_context(anyio.create_task_group())
        guarded(leading, "leader", leader.run)
        await _first_picture(viewer)
        if backend.identity.is_open and not ip_address(listener.getsockname()[0]).is_loopback:
            advice = f"set HOLDFAST_API_TOKEN, {TOKENS_FILE} or {ISSUER}"
            log.warning("the API accepts requests without a token", api=api_url, advice=advice)
        announce(settings.ready_file, {"control": listening.endpoint, "api": api_url})
        log.info("serving", control=listening.endpoint, api=api_url)
        await anyio.sleep_forever()


async def _first_picture(viewer: Viewer) -> None:
    """Wait until this supervisor leads or has a leader: clients may send requests as soon as the ready file exists."""
    while True:
        try:
            if await viewer.look() is not None:
                return
        except Unavailable:
            pass  # the leader's loop logs it; a service waits for its event log without a limit
        await anyio.sleep(PICTURE_POLL_S)
