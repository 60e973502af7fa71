"""Supervisors under test: the real service on any log, logs that die at a chosen moment, and agents that only play."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import grpc
import httpx
from anyio.abc import TaskGroup
from waiting import TIMEOUT_S, wait_until_async

from holdfast.agent.connection.streams import write
from holdfast.domain.errors import Unavailable
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.nodes import PROTOCOL_VERSION, NodeFacts, Preflight, RunningWorker
from holdfast.domain.orders import (
    CheckLink,
    FirstStepsRecorded,
    Hello,
    Order,
    OrderDone,
    Prepare,
    RanksStepping,
    Report,
    Start,
    Stop,
)
from holdfast.log.names import FINDINGS
from holdfast.log.protocol import Backlog, Commit, Delivery, Entry, FencedLog, Lease, Renewal, Usage
from holdfast.runtime.rpc.grpc_channel import open_channel
from holdfast.supervisor.leader.term import LeaseTimes
from holdfast.supervisor.service import run
from holdfast.supervisor.settings import SupervisorSettings
from holdfast.v1 import control_pb2 as pb
from holdfast.v1.control_pb2_grpc import ControlStub
from holdfast.wire.control import decode_first_steps_recorded, decode_order, encode_beat, encode_report
from holdfast.wire.events import finding_entry

# A takeover within a second or two, and no lease lost to a busy machine: that would be another test than the one meant.
QUICK = LeaseTimes(ttl_s=1.5, renew_s=0.3, retry_s=0.05, margin_s=0.2)
# Where nobody is to take over: a leader whose process did not run for some seconds still leads.
STEADY = LeaseTimes(ttl_s=60.0)
BEAT_S = 0.1

# ---------------------------------------------------------------- the log of a process that dies


class MortalLog:
    """Passes everything on until a commit that meets `die_when`'s condition; then its process is dead for the world.

    `after`: that commit still happens, and nothing that follows from it.
    """

    def __init__(self, log: FencedLog) -> None:
        self._log = log
        self._condition: Callable[[Commit], bool] = lambda _: False
        self._after = False
        self.dead = False

    def die_when(self, condition: Callable[[Commit], bool], *, after: bool) -> None:
        self._condition, self._after = condition, after

    def _alive(self) -> FencedLog:
        if self.dead:
            raise Unavailable("this process is dead")
        return self._log

    async def commit(self, lease: Lease, commit: Commit) -> None:
        log = self._alive()
        self.dead = self._condition(commit)
        if not self.dead or self._after:
            await log.commit(lease, commit)
        self._alive()

    async def append(self, stream: str, *entries: Entry) -> list[str]:
        return await self._alive().append(stream, *entries)

    async def subscribe(
        self, *streams: str, group: str, consumer: str, **options: Any
    ) -> AsyncIterator[list[Delivery]]:
        batches = self._alive().subscribe(*streams, group=group, consumer=consumer, **options)
        async for batch in batches:
            self._alive()
            yield batch

    async def acknowledge(self, stream: str, group: str, *positions: str) -> None:
        await self._alive().acknowledge(stream, group, *positions)

    async def read(
        self, stream: str, *, after: str = "0", count: int = 1000, block_s: float | None = None
    ) -> list[Delivery]:
        return await self._alive().read(stream, after=after, count=count, block_s=block_s)

    async def last_position(self, stream: str) -> str:
        return await self._alive().last_position(stream)

    async def backlog(self, stream: str, group: str) -> Backlog:
        return await self._alive().backlog(stream, group)

    async def usage(self) -> Usage:
        return await self._alive().usage()

    async def lifetime(self) -> str:
        return await self._alive().lifetime()

    def newest_epoch(self, name: str) -> int:
        return self._log.newest_epoch(name)

    async def candidate(self, name: str) -> str:
        return await self._alive().candidate(name)

    async def ping(self) -> None:
        await self._alive().ping()

    async def aclose(self) -> None:
        await self._log.aclose()

    async def acquire(self, name: str, holder: str, ttl_s: float, *, begin: bool = True) -> Lease | None:
        return await self._alive().acquire(name, holder, ttl_s, begin=begin)

    async def renew(self, lease: Lease, ttl_s: float, at: float | None = None) -> bool:
        return await self._alive().renew(lease, ttl_s, at)

    async def last_renewal(self, name: str) -> Renewal | None:
        return await self._alive().last_renewal(name)

    async def release(self, lease: Lease) -> None:
        await self._alive().release(lease)

    async def snapshot(self, name: str) -> Mapping[str, bytes]:
        return await self._alive().snapshot(name)


# ---------------------------------------------------------------- supervisors


@dataclass(slots=True)
class Running:
    """A supervisor that serves."""

    control: str
    api: str
    scope: anyio.CancelScope

    def client(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.api, timeout=TIMEOUT_S, **options)

    async def get(self, path: str) -> Any:
        async with self.client() as client:
            answer = await client.get(path)
        answer.raise_for_status()
        return answer.json()

    async def post(self, path: str, body: Any = None) -> Any:
        """The finished operation."""
        async with self.client() as client:
            answer = await client.post(path, json=body)
            assert answer.status_code == 202, answer.text

            async def done() -> Any:
                operation = (await client.get(answer.headers["Location"])).json()
                return operation if operation["state"] != "pending" else None

            return await wait_until_async(done, description=f"the operation of POST {path}")


async def start_supervisor(
    tasks: TaskGroup,
    directory: Path,
    log: FencedLog,
    *,
    name: str = "sup-1",
    times: LeaseTimes = STEADY,
    **settings: Any,
) -> Running:
    """The whole service in this process, on free ports. `scope.cancel()` ends it; then it closes `log`."""
    await anyio.Path(directory).mkdir(parents=True, exist_ok=True)
    ready = directory / "ready.json"
    await anyio.Path(ready).unlink(missing_ok=True)
    config = SupervisorSettings(
        **{
            "redis_url": "memory",
            "supervisor_listen": "127.0.0.1:0",
            "api_listen": "127.0.0.1:0",
            "data_dir": directory,
            "ready_file": ready,
            "supervisor_name": name,
            "diagnostics": "127.0.0.1:1",
            **settings,
        }
    )
    scope = anyio.CancelScope()

    async def serve() -> None:
        try:
            with scope:
                await run(config, log, times=times)
        finally:
            with anyio.CancelScope(shield=True):
                await log.aclose()

    tasks.start_soon(serve)
    await wait_until_async(ready.exists, description=f"{name} to serve")
    endpoints = httpx.Response(200, content=ready.read_bytes()).json()
    return Running(endpoints["control"], endpoints["api"], scope)


# ---------------------------------------------------------------- agents


def facts(node: str, incarnation: str = "i1", **changes: Any) -> NodeFacts:
    values: dict[str, Any] = {
        "node": node,
        "incarnation": incarnation,
        "hostname": "host",
        "address": "127.0.0.1",
        "zone": "",
        "capacity": 1,
        "replicator_endpoint": "",
        "agent_pid": 1,
        "directory": f"/nodes/{node}",
        "disk_dir": f"/disk/{node}",
        "kernel_log": "",
        "protocol_version": PROTOCOL_VERSION,
    }
    return NodeFacts(**{**values, **changes})


@dataclass(slots=True)
class PlayedAgent:
    """Speaks the real protocol over real gRPC and has no workers: every order succeeds, once per id."""

    node: str
    endpoints: Sequence[str]
    incarnation: str = "i1"
    steps: bool = True  # its ranks step after Start
    executed: dict[str, Order] = field(default_factory=dict)  # by command id, in order
    answers: dict[str, OrderDone] = field(default_factory=dict)
    repeats: int = 0
    epochs: list[int] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    connected: bool = False
    boot_id: str = ""  # of its machine
    machine_id: str = ""
    preflight: Preflight | None = None
    _seq: int = 0
    first_steps_in_beats: bool = True  # otherwise an agent of an earlier version, which reports them
    recorded: list[FirstStepsRecorded] = field(default_factory=list)
    _in_beats: tuple[RanksStepping, ...] = ()  # not recorded yet
    _waiting: dict[int, Report] = field(default_factory=dict)  # not acknowledged
    _writing: anyio.Lock = field(default_factory=anyio.Lock)

    async def run(self) -> None:
        """Until cancelled."""
        turn = 0
        while True:
            async with open_channel(self.endpoints[turn % len(self.endpoints)]) as channel:
                try:
                    await self._converse(ControlStub(channel).Session())
                except* grpc.aio.AioRpcError as errors:
                    self.refusals.extend(map(_words, errors.exceptions))
            self.connected = False
            turn += 1
            await anyio.sleep(0.02)

    async def _converse(self, call: Any) -> None:
        said = [self._numbered(report) for report in (self._hello(), *self._again())]
        try:
            async with anyio.create_task_group() as tasks:
                for message in said:
                    await self._write(call, message)
                tasks.start_soon(self._beat, call)
                while (message := await call.read()) is not grpc.aio.EOF:
                    await self._hear(call, message)
                tasks.cancel_scope.cancel()
            self.refusals.append(f"{(await call.code()).name}: {await call.details()}")
        finally:
            call.cancel()

    def facts(self) -> NodeFacts:
        return facts(self.node, self.incarnation, boot_id=self.boot_id, machine_id=self.machine_id)

    def _hello(self) -> Hello:
        return Hello(self.facts(), preflight=self.preflight)

    async def _beat(self, call: Any) -> None:
        while True:
            await anyio.sleep(BEAT_S)
            await self._write(call, encode_beat(time.time(), first_steps=self._in_beats))

    async def _write(self, call: Any, message: pb.AgentMessage) -> None:
        async with self._writing:
            await write(call, message)  # one that finds the stream ended raises why

    def _again(self) -> list[Report]:
        """What was not acknowledged gets new numbers, behind those of the greeting."""
        unsaid = [*self._waiting.values(), *self._in_beats]
        self._waiting.clear()
        self._in_beats = ()
        return unsaid

    def _numbered(self, report: Report) -> pb.AgentMessage:
        self._seq += 1
        if not isinstance(report, Hello):
            self._waiting[self._seq] = report
        return encode_report(report, self._seq)

    async def _hear(self, call: Any, message: pb.SupervisorMessage) -> None:
        match message.WhichOneof("message"):
            case "welcome":
                self.connected = True
                self.epochs.append(message.welcome.epoch)
            case "ack":
                self._waiting = {seq: report for seq, report in self._waiting.items() if seq > message.ack.seq}
            case "command" if message.command.WhichOneof("order") == "check_link":
                order = decode_order(message.command)
                assert isinstance(order, CheckLink)
                done = await anyio.to_thread.run_sync(self.check_link, message.command.command_id, order)
                await self._write(call, self._numbered(done))
            case "first_steps_recorded":
                recorded = decode_first_steps_recorded(message.first_steps_recorded)
                self.recorded.append(recorded)
                self._in_beats = tuple(each for each in self._in_beats if each.generation != recorded.generation)
            case "command":
                reports = self._execute(message.command)
                if self.first_steps_in_beats:
                    self._in_beats += tuple(each for each in reports if isinstance(each, RanksStepping))
                    reports = [each for each in reports if not isinstance(each, RanksStepping)]
                for said in [self._numbered(report) for report in reports]:
                    await self._write(call, said)
                if self._in_beats:
                    await self._write(call, encode_beat(time.time(), first_steps=self._in_beats))

    def _execute(self, command: pb.Command) -> list[Report]:
        assert command.epoch >= max(self.epochs), "an order of an epoch that is over"
        if command.command_id in self.executed:
            self.repeats += 1
            return [self.answers[command.command_id]]
        order = decode_order(command)
        self.executed[command.command_id] = order
        done = OrderDone(command.command_id, ok=True, at=time.time())
        reports: list[Report] = [done]
        match order:
            case Prepare():
                ranks = order.placement.ranks
                workers = tuple(RunningWorker(order.job, order.generation, rank, 1000 + rank) for rank in ranks)
                done = OrderDone(command.command_id, ok=True, master="127.0.0.1:1", at=time.time(), workers=workers)
                reports = [done]
            case Start() if self.steps:
                reports.append(RanksStepping(order.job, order.generation, self.ranks, 1, time.time()))
            case _:
                pass
        self.answers[command.command_id] = done
        return reports

    def check_link(self, command_id: str, order: CheckLink) -> OrderDone:
        """In a thread."""
        return OrderDone(command_id, ok=False, reason="it has no replicator", at=time.time())

    @property
    def ranks(self) -> tuple[int, ...]:
        newest = [order for order in self.executed.values() if isinstance(order, Prepare)][-1]
        return tuple(newest.placement.ranks)

    def generations(self, kind: type[Order]) -> list[int]:
        """Of every order of this kind that it has executed."""
        return [
            o.generation
            for o in self.executed.values()
            if isinstance(o, kind) and isinstance(o, Prepare | Start | Stop)
        ]


def _words(error: BaseException) -> str:
    return f"{error.code().name}: {error.details()}" if isinstance(error, grpc.aio.AioRpcError) else str(error)


@asynccontextmanager
async def played_agents(
    tasks: TaskGroup, names: Sequence[str], endpoints: Sequence[str]
) -> AsyncIterator[list[PlayedAgent]]:
    agents = [PlayedAgent(name, endpoints) for name in names]
    async with anyio.create_task_group() as own:
        for agent in agents:
            own.start_soon(agent.run)
        await wait_until_async(lambda: all(agent.connected for agent in agents), description="a session of every agent")
        yield agents
        own.cancel_scope.cancel()


# ---------------------------------------------------------------- what happens


def job_body(name: str = "gpt", nodes: int = 2, **changes: Any) -> dict[str, Any]:
    return {"name": name, "script": "/work/train.py", "nodes": nodes, **changes}


async def until_phase(supervisor: Running, job: str, phase: str, *, timeout_s: float = TIMEOUT_S) -> Any:
    async def there() -> Any:
        async with supervisor.client() as client:
            answer = await client.get(f"/v1/jobs/{job}")
        # a standby may not have heard of it yet, and between two leaders nobody can say
        return answer.json() if answer.status_code == 200 and answer.json()["phase"] == phase else None

    return await wait_until_async(there, description=f"{job} to be {phase}", timeout_s=timeout_s)


def crash(job: str, generation: int, node: str, rank: int, *, name: str = "f-1") -> Entry:
    now = time.time()
    return finding_entry(
        Finding(
            id=name,
            kind=FindingKind.WORKER_CRASH,
            severity=Severity.ERROR,
            at=now,
            since=now,
            summary=f"rank {rank} was killed by SIGKILL",
            node=node,
            job=job,
            generation=generation,
            rank=rank,
        )
    )


async def publish(log: FencedLog, *entries: Entry) -> None:
    await log.append(FINDINGS, *entries)
