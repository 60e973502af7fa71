"""Agents of one fleet at the services of another, over real gRPC: neither hears a word of the other."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import grpc
import pytest
from lone_sessions import lone_session
from structlog.testing import capture_logs
from waiting import wait_until_async

from holdfast.agent.connection import streams
from holdfast.agent.connection.outbox import Outbox
from holdfast.agent.connection.uplink import Uplink
from holdfast.runtime.rpc.grpc_channel import open_channel
from holdfast.runtime.rpc.grpc_server import listen
from holdfast.runtime.trust.fleet import Membership
from holdfast.v1 import control_pb2 as pb
from holdfast.v1 import telemetry_pb2
from holdfast.v1.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from holdfast.v1.telemetry_pb2_grpc import TelemetryServicer, add_TelemetryServicer_to_server
from holdfast.wire.control import encode_welcome

pytestmark = pytest.mark.anyio

SERVICES = ("holdfast.v1.Control", "holdfast.v1.Telemetry")
OURS, THEIRS = Membership("main", ("token-of-our-fleet",)), Membership("main", ("token-of-their-fleet",))


class Service(ControlServicer, TelemetryServicer):
    """Supervisor and diagnostics in one; counts what it hears."""

    def __init__(self) -> None:
        self.calls = self.reports = self.ticks = 0

    async def Session(self, request_iterator: AsyncIterator[pb.AgentMessage], context: Any) -> None:  # type: ignore[override]  # noqa: N802
        self.calls += 1
        await context.write(encode_welcome(1, "sup", []))
        async for _ in request_iterator:
            self.reports += 1

    async def Stream(self, request_iterator: AsyncIterator[telemetry_pb2.Tick], context: Any) -> None:  # type: ignore[override]  # noqa: N802
        self.calls += 1
        async for _ in request_iterator:
            self.ticks += 1


@asynccontextmanager
async def served(membership: Membership | None) -> AsyncIterator[tuple[Service, str]]:
    service = Service()

    def register(server: grpc.aio.Server) -> None:
        add_ControlServicer_to_server(service, server)
        add_TelemetryServicer_to_server(service, server)

    async with listen("127.0.0.1:0", register, services=SERVICES, membership=membership) as listening:
        yield service, listening.endpoint


@asynccontextmanager
async def agent(endpoints: list[str], membership: Membership) -> AsyncIterator[None]:
    session = lone_session(endpoints, "n1", membership=membership)
    workers_ended = anyio.Event()
    workers_ended.set()
    uplink = Uplink(
        Outbox("n1", "i1"),
        standing=tuple,
        sample=lambda _: (),
        lost=lambda: 0,
        last_words=workers_ended,
        membership=membership,
    )
    uplink.use(endpoints)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.run)
        tasks.start_soon(uplink.run)
        yield
        tasks.cancel_scope.cancel()


def refusals(logs: list[Any]) -> list[str]:
    return [each["reason"] for each in logs if each["event"] in ("control session refused", "control session failed")]


def telemetry_refusals(logs: list[Any]) -> list[str]:
    return [each["reason"] for each in logs if each["event"] in ("telemetry stream refused", "telemetry stream failed")]


@pytest.mark.parametrize("membership", [OURS, Membership(tokens=OURS.tokens), Membership("main")])
async def test_an_agent_and_services_of_one_fleet(membership: Membership) -> None:
    door = OURS if membership.tokens else Membership("main")
    async with served(door) as (service, endpoint), agent([endpoint], membership):
        await wait_until_async(lambda: service.reports and service.ticks, description="Hello and a tick")


@pytest.mark.parametrize(
    ("mine", "theirs", "reason"),
    [
        (OURS, THEIRS, "join token is not the one"),
        (Membership("main"), THEIRS, "has a join token"),
        (Membership("ours"), Membership("theirs"), "this is fleet 'theirs', not 'ours'"),
        (OURS, Membership("main"), "does not prove that it is of fleet 'main'"),
    ],
)
async def test_of_another_fleet_nothing_is_heard(mine: Membership, theirs: Membership, reason: str) -> None:
    with capture_logs() as logs:
        async with served(theirs) as (service, endpoint), agent([endpoint], mine):
            await wait_until_async(
                lambda: refusals(logs) and telemetry_refusals(logs), description="both streams to be refused"
            )
        assert reason in refusals(logs)[0]
        assert reason in telemetry_refusals(logs)[0]
        assert (service.reports, service.ticks) == (0, 0)


async def test_a_service_without_an_answer_to_introductions_hears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a version before join tokens sends no metadata until it has heard Hello."""
    monkeypatch.setattr(streams, "PROOF_TIMEOUT_S", 0.2)
    with capture_logs() as logs:
        async with served(None) as (service, endpoint), agent([endpoint], OURS):
            await wait_until_async(
                lambda: refusals(logs) and telemetry_refusals(logs), description="both streams to be given up"
            )
        assert "join token" in refusals(logs)[0]
        assert "join token" in telemetry_refusals(logs)[0]
        assert (service.reports, service.ticks) == (0, 0)


async def test_an_agent_without_a_token_works_with_a_service_before_join_tokens() -> None:
    async with served(None) as (service, endpoint), agent([endpoint], Membership("main")):
        await wait_until_async(lambda: service.reports and service.ticks, description="Hello and a tick")


async def test_the_right_fleet_among_several_endpoints_is_found_and_strangers_are_not_asked_in_haste(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "REFUSED_S", 3600.0)
    async with served(THEIRS) as (stranger, first), served(OURS) as (service, second):
        async with agent([first, second], OURS):
            await wait_until_async(lambda: service.reports and service.ticks, description="Hello and a tick")
        assert stranger.calls == 0


async def test_a_refusal_is_logged_once_per_host_and_minute() -> None:
    with capture_logs() as logs:
        async with served(OURS) as (service, endpoint), open_channel(endpoint) as channel:
            for _ in range(20):
                call: Any = channel.stream_stream("/holdfast.v1.Control/Session")()
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    async for _ in call:
                        pass
                assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        assert service.calls == 0
        assert [each["event"] for each in logs if each["log_level"] == "warning"] == ["agent of another fleet refused"]
