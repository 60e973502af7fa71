"""The control session over real gRPC: who may speak, what is acknowledged, and what the end of a stream means."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import grpc
import pytest
from supervising import PlayedAgent, Running, facts, job_body, start_supervisor, until_phase
from waiting import TIMEOUT_S, quickest_async, wait_until_async

from holdfast.domain import orders
from holdfast.domain.nodes import PEERS, Check, Preflight
from holdfast.domain.orders import FirstStepsRecorded, Hello, Inventory, OrderDone
from holdfast.log.memory import MemoryLog
from holdfast.log.names import INBOX
from holdfast.log.protocol import Entry
from holdfast.runtime.rpc.grpc_channel import open_channel
from holdfast.supervisor.agents import sessions
from holdfast.v1 import control_pb2 as pb
from holdfast.v1.control_pb2_grpc import ControlStub
from holdfast.wire.control import encode_beat, encode_report

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def supervisor(directory: Path, log: MemoryLog | None = None) -> AsyncIterator[Running]:
    async with anyio.create_task_group() as tasks:
        yield await start_supervisor(tasks, directory, log or MemoryLog())
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def session(endpoint: str, *messages: pb.AgentMessage) -> AsyncIterator[Any]:
    """A raw session on which these were said."""
    async with open_channel(endpoint) as channel:
        call = ControlStub(channel).Session()
        for message in messages:
            await call.write(message)
        try:
            yield call
        finally:
            call.cancel()


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    """How the supervisor ended it. The status comes behind the messages, so they are read first."""
    with anyio.fail_after(TIMEOUT_S), contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code(), await call.details()


def hello(node: str = "n1", incarnation: str = "i1", seq: int = 1, **changes: Any) -> pb.AgentMessage:
    return encode_report(Hello(facts(node, incarnation, **changes)), seq)


async def test_welcome_then_an_acknowledgement(tmp_path: Path) -> None:
    async with supervisor(tmp_path) as sup, session(sup.control, hello(seq=7)) as call:
        welcome, ack = await call.read(), await call.read()
        assert list(welcome.welcome.diagnostics) == ["127.0.0.1:1"]
        assert welcome.welcome.supervisor == "sup-1"
        assert ack.ack.seq == 7


async def test_an_agent_that_reaches_no_other_node_receives_those_that_are_there(tmp_path: Path) -> None:
    """Those that it was told in its Welcome may have been replaced weeks ago."""

    def tested(seq: int, *, ok: bool) -> pb.AgentMessage:
        return encode_report(orders.Tested(Preflight(1.0, 0.1, (Check(PEERS, ok, "0 of 2 answer"),))), seq)

    async def present() -> list[str]:
        while (message := await call.read()).WhichOneof("message") != "peers":
            assert message.WhichOneof("message") == "ack"
        return list(message.peers.endpoints)

    async with supervisor(tmp_path) as sup, session(sup.control, hello(seq=1, replicator_endpoint="n1:1")) as call:
        assert [(await call.read()).WhichOneof("message") for _ in range(2)] == ["welcome", "ack"]
        async with session(sup.control, hello("n2", replicator_endpoint="n2:1")) as other:
            assert list((await other.read()).welcome.peers) == ["n1:1"]
            await call.write(tested(2, ok=True))
            await call.write(tested(3, ok=False))
            assert await present() == ["n2:1"]
        with anyio.fail_after(TIMEOUT_S):
            for seq in itertools.count(4):  # until the supervisor knows that the other one is gone
                await call.write(tested(seq, ok=False))
                if not await present():
                    break


async def test_a_foreign_protocol_version_is_refused_by_name(tmp_path: Path) -> None:
    async with supervisor(tmp_path) as sup, session(sup.control, hello(protocol_version=9)) as call:
        code, details = await refusal(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "n1" in details
        assert "version 9" in details
        assert "install the same version" in details


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (encode_report(OrderDone("c", ok=True), 1), "begins with Hello"),
        (pb.AgentMessage(seq=1), "none that is known here"),
        (pb.AgentMessage(seq=1, hello=pb.Hello()), "hello.node: missing"),
    ],
)
async def test_a_session_that_begins_wrongly_is_refused(tmp_path: Path, message: pb.AgentMessage, words: str) -> None:
    async with supervisor(tmp_path) as sup, session(sup.control, message) as call:
        code, details = await refusal(call)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert words in details


async def test_garbage_ends_its_own_session_and_nobody_elses(tmp_path: Path) -> None:
    async with supervisor(tmp_path) as sup, session(sup.control, hello("good")) as good:
        async with session(sup.control, hello("bad"), pb.AgentMessage(seq=2)) as bad:
            code, details = await refusal(bad)
            assert (code, "none that is known" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        await good.write(encode_report(OrderDone("c", ok=True), 2))
        acks = [(await good.read()).ack.seq for _ in range(3)]
        assert acks == [0, 1, 2]  # the first is the welcome


async def test_a_refusal_always_reaches_its_agent(tmp_path: Path) -> None:
    """Also while an acknowledgement is on its way: gRPC refuses a status beside a write that was cancelled."""
    async with supervisor(tmp_path) as sup:
        for number in range(100):
            async with session(sup.control, hello(f"bad-{number}"), pb.AgentMessage(seq=2)) as bad:
                code, _ = await refusal(bad)
                assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_beat_is_answered_when_nothing_else_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "ANSWER_S", 0.0)
    async with supervisor(tmp_path) as sup, session(sup.control, hello()) as call:
        assert (await call.read()).welcome.answers_beats
        assert (await call.read()).ack.seq == 1
        await call.write(encode_beat(0.0))
        assert (await call.read()).WhichOneof("message") == "heard"


async def test_an_inventory_that_changes_one_that_never_came_begins_a_new_session(tmp_path: Path) -> None:
    """The new one begins with all of it; until then nothing is forgotten and nothing is made up."""
    async with supervisor(tmp_path) as sup, session(sup.control, hello()) as call:
        welcome = await call.read()
        assert welcome.welcome.inventory_differences
        assert welcome.welcome.columns
        assert welcome.welcome.shard_shapes
        await call.write(encode_report(Inventory("gpt", base=77), 2))
        code, details = await refusal(call)
        assert code is grpc.StatusCode.ABORTED
        assert "did not arrive" in details


async def test_a_second_agent_of_a_name_is_refused_while_the_first_is_alive(tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        sup = await start_supervisor(tasks, tmp_path, MemoryLog())
        first = PlayedAgent("n1", [sup.control])
        tasks.start_soon(first.run)
        await wait_until_async(lambda: first.connected, description="the first")
        async with session(sup.control, hello(incarnation="i2")) as call:
            code, details = await refusal(call)
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert "HOLDFAST_NODE" in details
        assert first.connected
        assert first.refusals == []
        tasks.cancel_scope.cancel()


async def test_a_silent_session_gives_way_to_a_new_agent(tmp_path: Path) -> None:
    async with supervisor(tmp_path) as sup, session(sup.control, hello(incarnation="i1")) as silent:
        await silent.read()

        async def taken() -> bool:
            async with session(sup.control, hello(incarnation="i2")) as call:
                try:
                    return bool((await call.read()).welcome.epoch)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                        raise
                    return False

        await wait_until_async(taken, description="the new agent to be welcome", poll_s=0.2)
        code, details = await refusal(silent)
        assert code is grpc.StatusCode.ABORTED
        assert "newer session" in details


async def test_the_same_agent_may_come_again_before_its_old_stream_is_noticed(tmp_path: Path) -> None:
    async with supervisor(tmp_path) as sup, session(sup.control, hello(seq=1)) as old:
        assert (await old.read()).WhichOneof("message") == "welcome"
        async with session(sup.control, hello(seq=2)) as new:
            assert (await new.read()).WhichOneof("message") == "welcome"
            code, _ = await refusal(old)
            assert code is grpc.StatusCode.ABORTED
            node = await until_node(sup, "n1", connected=True)
            assert node["state"] == "spare"


async def test_a_broken_stream_is_known_at_once_and_is_no_loss(tmp_path: Path) -> None:
    async with supervisor(tmp_path) as sup:

        async def known_after(round_: int) -> float:
            async with session(sup.control, hello(incarnation=f"i{round_}")) as call:
                await call.read()
                await until_node(sup, "n1", connected=True)
            began = anyio.current_time()
            node = await until_node(sup, "n1", connected=False)
            assert node["state"] == "spare"
            return anyio.current_time() - began

        assert await quickest_async(known_after, below_s=1.0) < 1.0


async def test_first_steps_in_heartbeats_are_confirmed_and_those_of_earlier_agents_acknowledged(tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        sup = await start_supervisor(tasks, tmp_path, MemoryLog())
        agents = [PlayedAgent("n1", [sup.control]), PlayedAgent("n2", [sup.control], first_steps_in_beats=False)]
        for agent in agents:
            tasks.start_soon(agent.run)
            await until_node(sup, agent.node, connected=True)
        await sup.post("/v1/jobs", job_body())
        await until_phase(sup, "gpt", "running")
        await wait_until_async(lambda: agents[0].recorded, description="the confirmation of the first steps")
        assert agents[0].recorded[0] == FirstStepsRecorded("gpt", 1)
        assert not agents[1].recorded
        tasks.cancel_scope.cancel()


async def test_orders_for_a_node_that_is_away_wait_for_it(tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        sup = await start_supervisor(tasks, tmp_path, MemoryLog())
        agents = [PlayedAgent(node, [sup.control]) for node in ("n1", "n2")]
        scopes = [anyio.CancelScope(), anyio.CancelScope()]

        async def live(agent: PlayedAgent, scope: anyio.CancelScope) -> None:
            with scope:
                await agent.run()

        for agent, scope in zip(agents, scopes, strict=True):
            tasks.start_soon(live, agent, scope)
            await until_node(sup, agent.node, connected=True)
        await sup.post("/v1/jobs", job_body())
        await until_phase(sup, "gpt", "running")
        scopes[1].cancel()
        await until_node(sup, "n2", connected=False)
        await sup.post("/v1/jobs/gpt/stop", {"reason": "enough", "save": False})
        await until_phase(sup, "gpt", "stopped")
        executed = len(agents[1].executed)
        tasks.start_soon(agents[1].run)
        await wait_until_async(lambda: len(agents[1].executed) > executed, description="the Stop order, late")
        tasks.cancel_scope.cancel()


async def test_poison_in_the_inbox_is_set_aside_and_the_leader_goes_on(tmp_path: Path) -> None:
    log = MemoryLog()
    async with supervisor(tmp_path, log) as sup:
        await log.append(INBOX, Entry("x", "Nonsense", b'{"_": "Nonsense"}'), Entry("y", "?", b"\xff\xfe"))
        await sup.post("/v1/breaker/reset")
        dead = await log.read(INBOX + ".dead")
        assert [delivery.entry.id for delivery in dead] == ["x", "y"]


async def until_node(sup: Running, name: str, *, connected: bool) -> Any:
    async def there() -> Any:
        nodes = {node["node"]: node for node in (await sup.get("/v1/nodes"))["items"]}
        return nodes[name] if name in nodes and nodes[name]["connected"] is connected else None

    return await wait_until_async(there, description=f"{name} connected: {connected}")
