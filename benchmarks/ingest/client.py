"""Generates a part of the load in a separate process: real gRPC streams of many nodes, with one tick per second each.

    python -m benchmarks.ingest.client '{"endpoint": …, "first": 0, "count": 100, "nodes": 100, …}'

Prints "connected" when diagnostics has acknowledged the hello of every node (a started call, or a written message, may wait in
diagnostics for any time). Then waits for a line on standard input, which is the start time, and at the end prints the numbers
of sent messages.
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
from anyio.abc import TaskGroup

from benchmarks.ingest.fleet import Node
from holdfast.agent.connection.streams import broken, write
from holdfast.runtime.garbage import collect_seldom
from holdfast.runtime.loop import ServiceLoop
from holdfast.runtime.rpc.grpc_channel import OPTIONS
from holdfast.v1 import telemetry_pb2 as pb

TICK_S = 1.0
BEAT_S = 2.5  # half of the time without a message after which a node counts as lost
CONNECTING_MAX = 64  # streams that are opened at the same time
CONNECT_TIMEOUT_S = 60.0
LEAVE_TIMEOUT_S = 30.0
METHOD = "/holdfast.v1.Telemetry/Stream"

Call = grpc.aio.StreamStreamCall[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Share:
    """The part of the fleet that this process simulates."""

    endpoint: str
    first: int  # number of the first node
    count: int
    nodes: int  # of the whole fleet
    seconds: float
    step_s: float
    broken_every_s: float  # interval at which its nodes, one after the other, report a lost GPU
    streams_per_connection: int


@dataclass(slots=True)
class Sent:
    ticks: int = 0
    bytes: int = 0
    late: int = 0  # ticks that were sent more than a second late, due to this process or to flow control
    bare: int = 0  # ticks without telemetry, which an agent sends while too many are unacknowledged
    acks: int = 0
    # node → time at which gRPC accepted its report of a broken GPU
    written_at: dict[str, float] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)  # node → reason of the early end of its stream
    cpu_s: float = 0.0


@dataclass(slots=True)
class Plan:
    """The times of the ticks, and the state of connecting."""

    starting: anyio.Event = field(default_factory=anyio.Event)  # the times are known
    started_at: float = math.inf
    end: float = math.inf
    tried: int = 0  # nodes that have connected or failed to
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
                opens = open_stream[place // share.streams_per_connection]
                speaking.start_soon(_run_node, share, place, opens, plan, sent, opening, hearing)
            with anyio.move_on_after(CONNECT_TIMEOUT_S):
                await plan.all_tried.wait()
            if plan.tried < share.count:
                print(f"{plan.tried} of {share.count}", flush=True)
                hearing.cancel_scope.cancel()
                return sent
            collect_seldom()
            print("connected", flush=True)
            plan.started_at = float(await anyio.to_thread.run_sync(sys.stdin.readline))
            plan.end = plan.started_at + share.seconds
            plan.starting.set()
            await anyio.sleep(plan.started_at - time.time())
            began = time.process_time()
        sent.cpu_s = time.process_time() - began
        # until the goodbyes are acknowledged and the streams end
        hearing.cancel_scope.deadline = anyio.current_time() + LEAVE_TIMEOUT_S
    for channel in channels:
        await channel.close()
    return sent


async def _run_node(
    share: Share,
    place: int,
    opens: Callable[[], Call],
    plan: Plan,
    sent: Sent,
    opening: anyio.Semaphore,
    hearing: TaskGroup,
) -> None:
    node = Node(share.first + place, share.nodes, step_s=share.step_s)
    with _noting(sent, node):
        try:
            async with opening:
                call = await _connected(opens, node)
        finally:
            plan.tried += 1
            if plan.tried == share.count:
                plan.all_tried.set()
        hearing.start_soon(_hear, call, node, sent)
        await _beat(call, node, plan)
        breaks_after_s = (place + 1) * share.broken_every_s
        due = plan.started_at + place / share.count * TICK_S
        while due < plan.end:
            await anyio.sleep(max(0.0, due - time.time()))
            now = time.time()
            # An agent that is delayed by flow control then sends one tick, not all missed ones.
            missed = int((now - due) / TICK_S)
            breaks = node.name not in sent.written_at and now >= plan.started_at + breaks_after_s
            sent.bare += node.stalled and not breaks
            raw = node.broken(now) if breaks else node.tick(now)
            await write(call, raw)
            if breaks:
                sent.written_at[node.name] = time.time()
            sent.ticks += 1
            sent.late += missed
            sent.bytes += len(raw)
            due += (missed + 1) * TICK_S
        await write(call, node.goodbye(plan.end))
        await call.done_writing()


async def _connected(opens: Callable[[], Call], node: Node) -> Call:
    """Return a stream whose first tick has been acknowledged."""
    call = opens()
    await write(call, node.hello(time.time()))
    if not isinstance(ack := await call.read(), bytes):
        raise await broken(call)
    node.hear(pb.TickAck.FromString(ack).seq)
    return call


async def _beat(call: Call, node: Node, plan: Plan) -> None:
    """Send heartbeats until the start, because a connected node without messages would count as lost."""
    while not plan.starting.is_set():
        await write(call, node.beat(time.time()))
        with anyio.move_on_after(BEAT_S):
            await plan.starting.wait()


async def _hear(call: Call, node: Node, sent: Sent) -> None:
    with _noting(sent, node):
        while isinstance(ack := await call.read(), bytes):
            sent.acks += 1
            node.hear(pb.TickAck.FromString(ack).seq)


@contextmanager
def _noting(sent: Sent, node: Node) -> Iterator[None]:
    """Record a broken stream with its reason; the other streams continue."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        sent.ended.setdefault(node.name, f"{error.code().name}: {error.details()}"[:300])


if __name__ == "__main__":
    said = anyio.run(run, Share(**json.loads(sys.argv[1])), backend_options={"loop_factory": ServiceLoop})
    print(json.dumps(asdict(said)), flush=True)
