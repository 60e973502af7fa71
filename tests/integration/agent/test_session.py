"""The agent's end of the control session, over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import grpc
import pytest
from lone_sessions import lone_session
from waiting import wait_until_async

from holdfast.agent.connection import session as module
from holdfast.agent.connection.reports import Reports
from holdfast.domain.errors import IncompatibleVersion
from holdfast.domain.generations import ShardKey, ShardRecord
from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import Inventory
from holdfast.runtime.rpc.grpc_server import listen
from holdfast.v1 import control_pb2 as pb
from holdfast.v1.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from holdfast.wire.control import encode_heard, encode_welcome

pytestmark = pytest.mark.anyio

BEAT_S = 0.01
UNANSWERED_BEATS_MAX = 20


class _Supervisor(ControlServicer):
    """Welcomes, and answers `answers` beats of each session; then its streams stand, and nobody serves them."""

    def __init__(self, answers: int, *, welcome: pb.SupervisorMessage) -> None:
        self.answers, self.welcome = answers, welcome
        self.sessions = self.beats = 0
        self.inventories: list[pb.Inventory] = []

    async def Session(self, request_iterator: AsyncIterator[pb.AgentMessage], context: Any) -> None:  # type: ignore[override]  # noqa: N802
        self.sessions += 1
        await context.write(self.welcome)
        answered = 0
        async for message in request_iterator:
            if message.WhichOneof("report") == "inventory":
                self.inventories.append(message.inventory)
            if message.WhichOneof("report") == "beat":
                self.beats += 1
                if answered < self.answers:
                    answered += 1
                    await context.write(encode_heard())


@asynccontextmanager
async def agent_of(supervisor: _Supervisor, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Reports]:
    monkeypatch.setattr(module, "BEAT_S", BEAT_S)
    monkeypatch.setattr(module, "UNANSWERED_BEATS_MAX", UNANSWERED_BEATS_MAX)

    def register(server: grpc.aio.Server) -> None:
        add_ControlServicer_to_server(supervisor, server)

    reports = Reports()
    async with listen("127.0.0.1:0", register, services=[]) as listening, anyio.create_task_group() as tasks:
        tasks.start_soon(lone_session([listening.endpoint], "n1", reports=reports).run)
        yield reports
        tasks.cancel_scope.cancel()


async def test_a_stream_that_nobody_serves_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = _Supervisor(5, welcome=encode_welcome(1, "sup", ["127.0.0.1:1"]))
    async with agent_of(supervisor, monkeypatch):
        await wait_until_async(lambda: supervisor.sessions >= 2, description="the agent to open another session")
        assert supervisor.beats >= UNANSWERED_BEATS_MAX


async def test_answered_beats_keep_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = _Supervisor(10**9, welcome=encode_welcome(1, "sup", ["127.0.0.1:1"]))
    async with agent_of(supervisor, monkeypatch):
        await wait_until_async(lambda: supervisor.beats > 3 * UNANSWERED_BEATS_MAX, description="many beats")
        assert supervisor.sessions == 1


async def test_a_supervisor_of_an_earlier_version_gets_no_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would understand a part of them."""
    welcome = encode_welcome(1, "sup", ["127.0.0.1:1"])
    welcome.welcome.shard_shapes = False
    supervisor = _Supervisor(10**9, welcome=welcome)

    async def talk() -> None:
        async with agent_of(supervisor, monkeypatch) as reports:
            reports.add(Inventory("gpt", (ShardRecord(ShardKey(1, 1, 0), Mesh.of({"dp": 1}), "disk", 9, "d"),)))
            await anyio.sleep_forever()

    with pytest.raises(ExceptionGroup) as raised:
        await talk()
    assert raised.group_contains(IncompatibleVersion, match="sup is of an earlier version")
    assert (supervisor.beats, supervisor.inventories) == (0, [])
