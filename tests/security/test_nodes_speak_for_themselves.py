"""A certificate of one node speaks for no other: to a real supervisor, to a real diagnostics, and as a server to agents."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import certificates
import grpc
import pytest
from lone_sessions import lone_session
from structlog.testing import capture_logs
from supervising import facts, start_supervisor
from waiting import TIMEOUT_S, wait_until_async

from holdfast.agent.connection.outbox import Outbox
from holdfast.agent.connection.uplink import Uplink
from holdfast.agent.settings import AgentSettings
from holdfast.diagnostics.service import run as run_diagnostics
from holdfast.diagnostics.settings import DiagnosticsSettings
from holdfast.domain.errors import InvalidSpec
from holdfast.domain.orders import Hello
from holdfast.domain.signals import KernelLine, Tick
from holdfast.log.memory import MemoryLog
from holdfast.log.names import FINDINGS
from holdfast.runtime.rpc.grpc_channel import open_channel
from holdfast.runtime.rpc.grpc_server import listen
from holdfast.runtime.settings import ServiceSettings
from holdfast.runtime.trust.identities import Role
from holdfast.runtime.trust.tls import Tls
from holdfast.v1 import control_pb2, telemetry_pb2
from holdfast.v1.control_pb2_grpc import ControlServicer, ControlStub, add_ControlServicer_to_server
from holdfast.v1.telemetry_pb2_grpc import TelemetryServicer, TelemetryStub, add_TelemetryServicer_to_server
from holdfast.wire.control import encode_report, encode_welcome
from holdfast.wire.telemetry import encode_tick

pytestmark = pytest.mark.anyio

XID_79 = "NVRM: Xid (PCI:0000:17:00): 79, pid=1234, GPU has fallen off the bus."


def tls_of(pki: Path, leaf: str, **more: Any) -> Tls:
    loaded = ServiceSettings(fleet="main", **{**certificates.files(pki, leaf), **more}).tls
    assert loaded is not None
    return loaded


def services(pki: Path, leaf: str) -> dict[str, Any]:
    return {**certificates.files(pki, leaf)}


def by_name(endpoint: str) -> str:
    return f"localhost:{endpoint.rpartition(':')[2]}"


# ---------------------------------------------------------------- to the services


async def greeting(endpoint: str, tls: Tls, node: str) -> str:
    """The welcome, or why there is none."""
    async with open_channel(by_name(endpoint), tls) as channel:
        call: Any = ControlStub(channel).Session()
        try:
            with anyio.fail_after(TIMEOUT_S):
                await call.write(encode_report(Hello(facts(node)), 1))
                return str((await call.read()).WhichOneof("message"))
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            call.cancel()


async def test_a_node_greets_the_supervisor_as_itself_only(pki: Path, tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        sup = await start_supervisor(tasks, tmp_path, MemoryLog(), **services(pki, "supervisor"))
        refusal = await greeting(sup.control, tls_of(pki, "node-9"), "node-0")
        assert refusal == (
            "PERMISSION_DENIED: the certificate is of holdfast://main/agent/node-9, and cannot speak for node 'node-0'"
        )
        assert (await sup.get("/v1/nodes"))["items"] == []
        assert await greeting(sup.control, tls_of(pki, "node-9"), "node-9") == "welcome"
        assert await greeting(sup.control, tls_of(pki, "any-agent"), "node-0") == "welcome"
        tasks.cancel_scope.cancel()


async def reported(endpoint: str, tls: Tls, node: str) -> str:
    """The answer of diagnostics to a GPU fault of the node."""
    async with open_channel(by_name(endpoint), tls) as channel:
        call: Any = TelemetryStub(channel).Stream()
        try:
            with anyio.fail_after(TIMEOUT_S):
                tick = Tick(node, "i1", 1, 1.0, (KernelLine(node, 1.0, XID_79),))
                await call.write(encode_tick(tick, wants_ack=True))
                await call.read()
                return "acknowledged"
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        finally:
            call.cancel()


async def test_a_node_tells_diagnostics_of_its_own_faults_only(pki: Path, tmp_path: Path) -> None:
    """The hole that identities close: node-9 reported Xid 79 for node-0, and the supervisor cordoned node-0."""
    log, ready = MemoryLog(), tmp_path / "ready.json"
    settings = DiagnosticsSettings(
        redis_url="redis://unused",
        diagnostics_listen="127.0.0.1:0",
        ready_file=ready,
        **services(pki, "diagnostics"),
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run_diagnostics, settings, log)
        await wait_until_async(ready.exists, description="diagnostics to serve")
        endpoint = json.loads(ready.read_text())["endpoint"]
        refusal = await reported(endpoint, tls_of(pki, "node-9"), "node-0")
        assert refusal.startswith("PERMISSION_DENIED: the certificate is of holdfast://main/agent/node-9, and cannot")
        assert await reported(endpoint, tls_of(pki, "node-9"), "node-9") == "acknowledged"
        found = [delivery.entry.data for delivery in await log.read(FINDINGS)]
        assert len(found) == 1, "the one that node-9 may report"
        assert b"node-0" not in str(found).encode()
        tasks.cancel_scope.cancel()


# ---------------------------------------------------------------- as a server


class Service(ControlServicer, TelemetryServicer):
    """Supervisor and diagnostics in one; counts what it hears."""

    def __init__(self) -> None:
        self.calls = self.reports = self.ticks = 0

    async def Session(self, request_iterator: AsyncIterator[control_pb2.AgentMessage], context: Any) -> None:  # type: ignore[override]  # noqa: N802
        self.calls += 1
        await context.write(encode_welcome(1, "sup", []))
        async for _ in request_iterator:
            self.reports += 1

    async def Stream(self, request_iterator: AsyncIterator[telemetry_pb2.Tick], context: Any) -> None:  # type: ignore[override]  # noqa: N802
        self.calls += 1
        async for _ in request_iterator:
            self.ticks += 1


@asynccontextmanager
async def posing(pki: Path, leaf: str) -> AsyncIterator[tuple[Service, str]]:
    """A server that has this certificate, and lets everybody in."""
    service = Service()

    def register(server: grpc.aio.Server) -> None:
        add_ControlServicer_to_server(service, server)
        add_TelemetryServicer_to_server(service, server)

    async with listen("localhost:0", register, services=(), tls=certificates.tls(pki, leaf, "ours")) as listening:
        yield service, listening.endpoint


@asynccontextmanager
async def agent(endpoint: str, tls: Tls) -> AsyncIterator[None]:
    session = lone_session([endpoint], "node-0", tls=tls)
    workers_ended = anyio.Event()
    workers_ended.set()
    uplink = Uplink(
        Outbox("node-0", "i1"), standing=tuple, sample=lambda _: (), lost=lambda: 0, last_words=workers_ended, tls=tls
    )
    uplink.use([endpoint])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.run)
        tasks.start_soon(uplink.run)
        yield
        tasks.cancel_scope.cancel()


def reasons(logs: list[Any], what: str) -> list[str]:
    """Of refusals. On a busy machine the server may also be too late to show its certificate, and is asked again."""
    warnings = [each for each in logs if each["event"].startswith(what) and each["log_level"] == "warning"]
    return [each["reason"] for each in warnings if "no certificate within" not in each["reason"]]


@pytest.mark.parametrize(
    ("server", "demand", "orders", "telemetry"),
    [
        ("supervisor", "auto", True, False),
        ("diagnostics", "auto", False, True),
        ("node-9", "auto", False, False),
        ("operator", "auto", False, False),
        ("other-fleet", "auto", False, False),
        ("unreadable", "auto", False, False),
        ("ours", "auto", False, False),
        ("ours", "optional", True, True),  # while certificates without an identity are replaced
        ("node-9", "optional", False, False),
        ("ours", "own certificate without one", True, True),  # an upgrade changes nothing
        ("node-9", "own certificate without one", False, False),
    ],
)
async def test_an_agent_obeys_a_supervisor_and_reports_to_diagnostics_only(
    pki: Path, server: str, demand: str, orders: bool, telemetry: bool
) -> None:
    old = demand == "own certificate without one"
    tls = tls_of(pki, "ours") if old else tls_of(pki, "agent", tls_identities=demand)
    with capture_logs() as logs:
        async with posing(pki, server) as (service, endpoint), agent(endpoint, tls):

            def decided() -> bool:
                session, stream = reasons(logs, "control session"), reasons(logs, "telemetry stream")
                return bool((service.reports or session) and (service.ticks or stream))

            await wait_until_async(decided, description="Hello or a refusal, a tick or a refusal")
    assert (service.reports > 0, service.ticks > 0) == (orders, telemetry)
    assert service.calls == orders + telemetry, "a server of another role does not even see a call"
    if server in ("node-9", "ours") and not orders:
        assert "must be a server for supervisor, and the certificate" in reasons(logs, "control session")[0]
        assert "must be a server for diagnostics, and the certificate" in reasons(logs, "telemetry stream")[0]


async def test_a_server_that_takes_the_place_of_the_one_that_was_looked_at_is_not_spoken_to(pki: Path) -> None:
    """node-9 on the way to the supervisor passes the first connection on, and answers the second one itself."""
    supervisor = (pki / "supervisor.pem").read_bytes()
    async with posing(pki, "node-9") as (service, endpoint):
        async with open_channel(endpoint, tls_of(pki, "agent"), pinned=supervisor) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await ControlStub(channel).Session(timeout=TIMEOUT_S).read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert service.calls == 0


# ---------------------------------------------------------------- at the start


def agent_settings(pki: Path, tmp_path: Path, leaf: str, **more: Any) -> AgentSettings:
    places = {"agent_dir": tmp_path, "memory_dir": tmp_path, "disk_dir": tmp_path}
    return AgentSettings(
        **{"supervisor": "localhost:1", "node": "node-0", **places, **certificates.files(pki, leaf), **more}
    )


@pytest.mark.parametrize(
    ("leaf", "more", "needed"),
    [
        ("node-9", {}, "a certificate for holdfast://main/agent/node-0; this one is for holdfast://main/agent/node-9"),
        ("supervisor", {}, "this one is for holdfast://main/supervisor"),
        ("other-fleet", {"fleet": "main"}, "holdfast://main/agent/node-0; this one is for holdfast://other/agent/node-0"),
        ("ours", {"tls_identities": "required"}, "holdfast://FLEET/agent/node-0; this one is for no identity"),
        ("unreadable", {}, "holdfast://main/king"),
    ],
)  # fmt: skip
def test_a_certificate_for_somebody_else_is_refused_at_the_start(
    pki: Path, tmp_path: Path, leaf: str, more: dict[str, Any], needed: str
) -> None:
    with pytest.raises(InvalidSpec) as refusal:
        agent_settings(pki, tmp_path, leaf, **more).tls_as(Role.AGENT, name="node-0")
    assert needed in str(refusal.value)
    assert "HOLDFAST_TLS_CERT" in str(refusal.value)


@pytest.mark.parametrize(("leaf", "warnings"), [("agent", 0), ("any-agent", 0), ("ours", 1), ("foreign-uri", 1)])
def test_who_checks_no_identities_says_so_at_the_start(pki: Path, tmp_path: Path, leaf: str, warnings: int) -> None:
    with capture_logs() as logs:
        agent_settings(pki, tmp_path, leaf).tls_as(Role.AGENT, name="node-0")
    said = [each for each in logs if each["log_level"] == "warning"]
    assert len(said) == warnings
    assert all("any certificate of the CA is accepted" in each["event"] for each in said)
    assert all("HOLDFAST_TLS_IDENTITIES=required" in each["advice"] for each in said)
