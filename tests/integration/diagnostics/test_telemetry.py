"""diagnostics over real gRPC, on a memory log and on a real Redis: what an agent sends, breaks and repeats."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
import grpc
import pytest
from diagnosing import BUG, COLLECTIVE, Fleet
from waiting import TIMEOUT_S, quickest_async, wait_until_async

from holdfast.diagnostics.service import run
from holdfast.diagnostics.settings import DiagnosticsSettings
from holdfast.domain.findings import Finding, FindingKind
from holdfast.domain.signals import NodeSignal, Tick
from holdfast.log.memory import MemoryLog
from holdfast.log.names import FINDINGS, STEPS
from holdfast.log.protocol import EventLog
from holdfast.log.redis import RedisLog
from holdfast.runtime.rpc.grpc_channel import open_channel
from holdfast.v1 import telemetry_pb2 as pb
from holdfast.v1.telemetry_pb2_grpc import TelemetryStub
from holdfast.wire.events import decode_finding, decode_steps
from holdfast.wire.telemetry import encode_tick

pytestmark = [pytest.mark.anyio]
Call = grpc.aio.StreamStreamCall[pb.Tick, pb.TickAck]


@dataclass
class Served:
    endpoint: str
    log: EventLog

    async def findings(self) -> list[Finding]:
        return [decode_finding(delivery.entry.data) for delivery in await self.log.read(FINDINGS)]

    async def until(self, count: int) -> list[Finding]:
        async def enough() -> list[Finding]:
            found = await self.findings()
            return found if len(found) >= count else []

        return await wait_until_async(enough, description=f"{count} findings")


@asynccontextmanager
async def serving(tmp_path: Path, log: EventLog) -> AsyncIterator[Served]:
    ready = tmp_path / "ready.json"
    settings = DiagnosticsSettings(
        redis_url="redis://unused", diagnostics_listen="127.0.0.1:0", ready_file=ready, unwitnessed_grace_s=1.5
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run, settings, log)
        await wait_until_async(ready.exists, description="the ready file")
        yield Served(json.loads(ready.read_text())["endpoint"], log)
        tasks.cancel_scope.cancel()


@pytest.fixture(params=["memory", "redis"])
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    log: EventLog = MemoryLog() if request.param == "memory" else RedisLog(request.getfixturevalue("redis_url"), "test")
    try:
        async with serving(tmp_path, log) as running:
            yield running
    finally:
        await log.aclose()


class Agent:
    """One node's stream, by hand."""

    def __init__(self, served: Served, node: str, incarnation: str = "a") -> None:
        self._channel = open_channel(served.endpoint)
        self.node, self.incarnation, self.seq = node, incarnation, 0
        self.call: Call = TelemetryStub(self._channel).Stream()

    async def send(self, *signals: NodeSignal, goodbye: bool = False) -> int:
        self.seq += 1
        at = signals[0].at if signals else 1.0
        message = encode_tick(Tick(self.node, self.incarnation, self.seq, at, signals), goodbye=goodbye, wants_ack=True)
        await self.call.write(message)
        return self.seq

    async def acked(self, seq: int) -> None:
        with anyio.fail_after(TIMEOUT_S):
            while True:
                ack = await self.call.read()
                assert isinstance(ack, pb.TickAck), await self.call.details()
                if ack.seq == seq:
                    return

    async def refusal(self) -> tuple[grpc.StatusCode, str]:
        with anyio.fail_after(TIMEOUT_S):
            return await self.call.code(), await self.call.details()

    async def hang_up(self) -> None:
        """Goodbye, and gone when diagnostics has ended the stream, as the agent does."""
        await self.send(goodbye=True)
        await self.call.done_writing()
        with anyio.fail_after(TIMEOUT_S):
            while await self.call.read() is not grpc.aio.EOF:
                pass
        await self._channel.close()

    async def vanish(self) -> None:
        """The connection breaks, as when the process is killed."""
        await self._channel.close()


@asynccontextmanager
async def agents(served: Served, fleet: Fleet, incarnation: str = "a") -> AsyncIterator[dict[str, Agent]]:
    opened = {node: Agent(served, node, incarnation) for node in fleet.names}
    for node, agent in opened.items():
        await agent.acked(await agent.send(fleet.started(node)))
    yield opened
    for agent in opened.values():
        await agent.vanish()


async def test_an_exit_is_in_the_log_when_its_tick_is_acknowledged(served: Served) -> None:
    fleet = Fleet(nodes=2)
    async with agents(served, fleet) as by_node:
        agent = by_node["n1"]
        await agent.acked(await agent.send(fleet.exit_of(1, error=BUG)))
        (found,) = await served.findings()
        assert (found.kind, found.rank, found.evidence["exception"]) == (
            FindingKind.WORKER_EXCEPTION,
            1,
            "ValueError",
        )
        assert found.traceparent


async def test_a_vanished_agent_is_a_lost_node_and_its_peers_are_cascade(served: Served) -> None:
    async def found_after(round_: int) -> float:
        fleet = Fleet(nodes=3, job=f"gpt{round_}")
        async with agents(served, fleet, incarnation=f"{round_}") as by_node:
            await by_node["n1"].vanish()
            for rank in (0, 2):
                await by_node[f"n{rank}"].send(fleet.exit_of(rank, error=COLLECTIVE))
            for rank in (0, 2):
                await by_node[f"n{rank}"].acked(by_node[f"n{rank}"].seq)  # after the settling time
            (found,) = (finding for finding in await served.findings() if finding.job == fleet.job)
            assert (found.kind, found.node, found.rank) == (FindingKind.NODE_LOST, "n1", 1)
            return found.at - found.since

    assert await quickest_async(found_after, below_s=0.3) < 0.3


async def test_a_goodbye_and_a_quick_return_are_no_faults(served: Served) -> None:
    fleet = Fleet(nodes=3)
    async with agents(served, fleet) as by_node:
        leaving = by_node["n0"]
        await leaving.acked(await leaving.send(goodbye=True))
        await leaving.vanish()
        await by_node["n1"].vanish()
        back = Agent(served, "n1")
        await back.acked(await back.send())
        await by_node["n2"].vanish()
        (found,) = await served.until(1)
        assert found.node == "n2"
        await back.vanish()


async def test_a_clean_end_is_no_fault_even_with_ranks(tmp_path: Path) -> None:
    """The agent stopped its workers, said so, and left."""
    fleet = Fleet(nodes=2)
    async with serving(tmp_path, MemoryLog()) as served, agents(served, fleet) as by_node:
        await by_node["n0"].hang_up()
        await by_node["n1"].vanish()
        (found,) = await served.until(1)
        assert found.node == "n1"


async def test_steps_arrive_in_batches(served: Served) -> None:
    fleet = Fleet(nodes=2)
    async with agents(served, fleet) as by_node:
        for step in (1, 2, 3):
            for node, agent in by_node.items():
                for rank in fleet.ranks_of(node):
                    fleet.ranks[rank].step = step
                await agent.send(fleet.columns(node, fleet.ranks_of(node)))

        async def steps() -> list[int]:
            batches = [decode_steps(delivery.entry.data) for delivery in await served.log.read(STEPS)]
            done = [record.step for batch in batches for record in batch]
            return done if len(done) >= 3 else []

        assert await wait_until_async(steps, description="three steps") == [1, 2, 3]


def _version(message: pb.Tick) -> None:
    message.protocol_version = 99


def _columns(message: pb.Tick) -> None:
    message.progress.add(at=1.0, job="j", generation=1, rank=[1, 2], step=[1])


def _nameless(message: pb.Tick) -> None:
    message.node = ""


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (_version, grpc.StatusCode.FAILED_PRECONDITION, "speaks protocol version 99, this side speaks 1"),
        (_columns, grpc.StatusCode.INVALID_ARGUMENT, "progress"),
        (_nameless, grpc.StatusCode.INVALID_ARGUMENT, "node"),
    ],
)
async def test_a_bad_tick_ends_its_own_stream_only(
    tmp_path: Path, spoil: Callable[[pb.Tick], None], code: grpc.StatusCode, words: str
) -> None:
    fleet = Fleet(nodes=2)
    async with serving(tmp_path, MemoryLog()) as served, agents(served, fleet) as by_node:
        bad = Agent(served, "n7")
        message = encode_tick(Tick("n7", "a", 1, 1.0))
        spoil(message)
        await bad.call.write(message)
        got, details = await bad.refusal()
        assert (got, words in details) == (code, True), details
        await by_node["n0"].acked(await by_node["n0"].send())
        assert await served.findings() == []
        await bad.vanish()


async def test_a_tick_of_ten_megabytes_is_refused_with_its_size(tmp_path: Path) -> None:
    fleet = Fleet(nodes=1)
    huge = Tick("n7", "a", 1, 1.0, tuple(fleet.columns("n7", (0,) * 1000) for _ in range(250)))
    async with serving(tmp_path, MemoryLog()) as served, agents(served, fleet) as by_node:
        bad, message = Agent(served, "n7"), encode_tick(huge)
        assert message.ByteSize() > 10_000_000
        await bad.call.write(message)
        code, details = await bad.refusal()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"{message.ByteSize()} bytes; at most 4194304" in details
        await by_node["n0"].acked(await by_node["n0"].send())
        await bad.vanish()


async def test_nonsense_from_a_worker_does_not_cost_its_node_the_stream(tmp_path: Path) -> None:
    """NaN timings, time that goes backwards, ranks out of range: passed over; what is true beside them is folded."""
    fleet = Fleet(nodes=2)
    log = MemoryLog()
    async with serving(tmp_path, log) as served, agents(served, fleet) as by_node:
        agent, good = by_node["n0"], fleet.columns("n0", (0,))
        for bad in (
            replace(good, started_at=(math.nan,)),
            replace(good, started_at=(good.ended_at[0] + 60.0,)),
            replace(good, rank=(4_000_000_000,)),
            replace(fleet.progress("n0"), rank=(9,)),
        ):
            await agent.acked(await agent.send(bad))
        await agent.acked(await agent.send(replace(good, at=-5.0)))  # time went backwards
        await agent.acked(await agent.send(fleet.exit_of(0, signal=9)))
        (found,) = await served.findings()
        assert found.kind is FindingKind.WORKER_CRASH


async def test_bytes_that_are_no_tick_hurt_nobody_else(tmp_path: Path) -> None:
    fleet = Fleet(nodes=1)
    async with serving(tmp_path, MemoryLog()) as served, agents(served, fleet) as by_node:
        async with open_channel(served.endpoint) as channel:
            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream("/holdfast.v1.Telemetry/Stream")()
            await call.write(b"\xff\xff\xff")
            assert await call.code() is not grpc.StatusCode.OK
        await by_node["n0"].acked(await by_node["n0"].send())
