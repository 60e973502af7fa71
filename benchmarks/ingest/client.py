"""Part of the load, in a process of its own: real gRPC streams of many nodes, a tick a second each.

    python -m benchmarks.ingest.client '{"endpoint": …, "first": 0, "count": 100, "nodes": 100, …}'

Says "connected" when every stream stands, waits for a line on standard input (the time to start at), and prints what it sent.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import anyio
import anyio.to_thread
import grpc

from benchmarks.ingest.fleet import Node
from holdfast.agent.streams import write
from holdfast.runtime.grpc_channel import OPTIONS

TICK_S = 1.0
CONNECTING_MAX = 64  # streams that open at the same time
CONNECT_TIMEOUT_S = 60.0
LEAVE_TIMEOUT_S = 30.0
METHOD = "/holdfast.v1.Telemetry/Stream"

Call = grpc.aio.StreamStreamCall[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Share:
    """What this process stands for."""

    endpoint: str
    first: int  # node
    count: int
    nodes: int  # of the whole fleet
    seconds: float
    step_s: float
    broken_every_s: float  # one of its nodes after the other reports a GPU as lost
    streams_per_connection: int


@dataclass(slots=True)
class Sent:
    ticks: int = 0
    bytes: int = 0
    late: int = (
        0  # ticks that left more than a second after their time: this process, or the flow control, held them back
    )
    acks: int = 0
    broken: int = 0  # streams that ended before their time
    refused: str = ""
    cpu_s: float = 0.0


@dataclass(slots=True)
class Plan:
    """When to count. Nodes that have connected beat before it as well, or they would be taken for lost."""

    started_at: float = math.inf
    end: float = math.inf
    tried: int = 0  # to connect
    all_tried: anyio.Event = field(default_factory=anyio.Event)


async def run(share: Share) -> Sent:
    sent, plan, opening = Sent(), Plan(), anyio.Semaphore(CONNECTING_MAX)
    channels = [
        grpc.aio.insecure_channel(share.endpoint, options=OPTIONS)
        for _ in range(-(-share.count // share.streams_per_connection))
    ]
    open_stream: list[Callable[[], Call]] = [channel.stream_stream(METHOD) for channel in channels]
    async with anyio.create_task_group() as hearing:
        async with anyio.create_task_group() as speaking:
            for place in range(share.count):
                call = open_stream[place // share.streams_per_connection]()
                speaking.start_soon(_speak, share, place, call, plan, sent, opening)
                hearing.start_soon(_hear, call, sent)
            with anyio.fail_after(CONNECT_TIMEOUT_S):
                await plan.all_tried.wait()
            print("connected", flush=True)
            plan.started_at = float(await anyio.to_thread.run_sync(sys.stdin.readline))
            plan.end = plan.started_at + share.seconds
            await anyio.sleep(plan.started_at - time.time())
            began = time.process_time()
        sent.cpu_s = time.process_time() - began
        hearing.cancel_scope.deadline = anyio.current_time() + LEAVE_TIMEOUT_S  # goodbyes are heard, and streams end
    for channel in channels:
        await channel.close()
    return sent


async def _speak(share: Share, place: int, call: Call, plan: Plan, sent: Sent, opening: anyio.Semaphore) -> None:
    node = Node(share.first + place, share.nodes, step_s=share.step_s)
    whole = True
    with _noting(sent):
        try:
            async with opening:
                await write(call, node.hello(time.time()))
        finally:
            plan.tried += 1
            if plan.tried == share.count:
                plan.all_tried.set()
        due = math.floor(time.time()) + 1.0 + place / share.count * TICK_S
        while due < plan.end:
            await anyio.sleep(max(0.0, due - time.time()))
            now = time.time()
            # An agent that is held back sends one tick when it can, not all that it missed.
            missed = int((now - due) / TICK_S)
            breaks = whole and now >= plan.started_at + (place + 1) * share.broken_every_s
            raw = node.broken(now) if breaks else node.tick(now)
            whole = whole and not breaks
            await write(call, raw)
            if due >= plan.started_at:
                sent.ticks += 1
                sent.late += missed
                sent.bytes += len(raw)
            due += (missed + 1) * TICK_S
        await write(call, node.goodbye(plan.end))
        await call.done_writing()


async def _hear(call: Call, sent: Sent) -> None:
    with _noting(sent):
        while await call.read() is not grpc.aio.EOF:
            sent.acks += 1


@contextmanager
def _noting(sent: Sent) -> Iterator[None]:
    """A stream that breaks is counted, and the first reason is kept; the others go on."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        sent.broken += 1
        sent.refused = sent.refused or f"{error.code().name}: {error.details()}"[:300]


if __name__ == "__main__":
    print(json.dumps(asdict(anyio.run(run, Share(**json.loads(sys.argv[1]))))), flush=True)
