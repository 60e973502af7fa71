"""Over real gRPC: what somebody achieves who may open a control session, and is not the agent that he speaks for."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import grpc
import pytest
from supervising import PlayedAgent, Running, facts, job_body, start_supervisor, until_phase
from waiting import wait_until_async

from holdfast.domain.orders import Hello, OrderDone, RanksFinished, Report
from holdfast.log.memory import MemoryLog
from holdfast.runtime.rpc.grpc_channel import open_channel
from holdfast.v1.control_pb2_grpc import ControlStub
from holdfast.wire.control import encode_report

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def session(endpoint: str, node: str, incarnation: str, seq: int) -> AsyncIterator[Any]:
    """A raw session, greeted and welcome."""
    async with open_channel(endpoint) as channel:
        call: Any = ControlStub(channel).Session()
        await call.write(encode_report(Hello(facts(node, incarnation)), seq))
        assert (await call.read()).WhichOneof("message") == "welcome"
        try:
            yield call
        finally:
            call.cancel()


async def say(call: Any, seq: int, report: Report) -> None:
    """Until it stands in the inbox."""
    await call.write(encode_report(report, seq))
    while (await call.read()).ack.seq < seq:
        pass


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[tuple[Running, list[PlayedAgent]]]:
    """A job on two nodes, whose agents live."""
    async with anyio.create_task_group() as tasks:
        sup = await start_supervisor(tasks, directory, MemoryLog())
        agents = [PlayedAgent(node, [sup.control]) for node in ("n1", "n2")]
        for agent in agents:
            tasks.start_soon(agent.run)
        await wait_until_async(lambda: all(agent.connected for agent in agents), description="the agents")
        await sup.post("/v1/jobs", job_body())
        await until_phase(sup, "gpt", "running")
        yield sup, agents
        tasks.cancel_scope.cancel()


async def folded(sup: Running) -> None:
    """Everything that was said before: the inbox has one order."""
    await sup.post("/v1/breaker/reset")


async def test_a_stranger_ends_no_job_and_answers_no_order(tmp_path: Path) -> None:
    async with running(tmp_path) as (sup, agents), session(sup.control, "n9", "i9", 1) as stranger:
        generation = (await sup.get("/v1/jobs/gpt"))["generation"]
        await say(stranger, 2, RanksFinished("gpt", generation, (0, 1), 1.0))
        ids = [command for agent in agents for command in agent.executed]
        for seq, command in enumerate(ids, 3):
            await say(stranger, seq, OrderDone(command, ok=False, reason="no"))
        await folded(sup)
        job = await sup.get("/v1/jobs/gpt")
        assert (job["phase"], job["generation"]) == ("running", generation)


async def test_an_agent_is_heard_after_somebody_greeted_in_its_name_with_a_huge_number(tmp_path: Path) -> None:
    """The stranger takes the session over; the agent takes it back, and the job goes on being served by it."""
    async with running(tmp_path) as (sup, agents):
        async with session(sup.control, "n1", "i1", 2**63) as stranger:
            await say(stranger, 2**63 + 1, OrderDone("c", ok=True))
            await wait_until_async(lambda: agents[0].refusals != [], description="the agent to be ousted")

        async def is_back() -> bool:
            nodes = {node["node"]: node for node in (await sup.get("/v1/nodes"))["items"]}
            return bool(nodes["n1"]["connected"]) and agents[0].connected

        await wait_until_async(is_back, description="the supervisor to hear the agent")
        executed = len(agents[0].executed)
        await sup.post("/v1/jobs/gpt/stop", {"reason": "enough", "save": False})
        await until_phase(sup, "gpt", "stopped")
        assert len(agents[0].executed) > executed
        assert "did not answer" not in (await sup.get("/v1/jobs/gpt"))["reason"]


async def test_a_session_speaks_for_one_node(tmp_path: Path) -> None:
    async with running(tmp_path) as (sup, agents), session(sup.control, "n9", "i9", 1) as stranger:
        await stranger.write(encode_report(Hello(facts("n1", "i1")), 2))
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (await stranger.read()) is not grpc.aio.EOF:
                pass
        assert await stranger.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "cannot become that of n1" in await stranger.details()
        assert all(agent.connected for agent in agents)
