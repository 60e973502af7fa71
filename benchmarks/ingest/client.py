"""Part of the load, in a process of its own: real gRPC streams of many nodes, a tick a second each.

    python -m benchmarks.ingest.client '{"endpoint": …, "first": 0, "count": 100, "nodes": 100, …}'

Says "connected" when every stream stands, waits for a line on standard input (the time to start at), and prints what it sent.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import anyio
import anyio.to_thread
import grpc

from benchmarks.ingest.fleet import Node
from holdfast.runtime.grpc_channel import OPTIONS

TICK_S = 1.0
CONNECTING_MAX = 64  # streams that open at the same time
CONNECT_TIMEOUT_S = 180.0
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
    refused: str = ""
    cpu_s: float = 0.0


async def run(share: Share) -> Sent:
    sent = Sent()
    nodes = [Node(share.first + i, share.nodes, step_s=share.step_s) for i in range(share.count)]
    channels = [
        grpc.aio.insecure_channel(share.endpoint, options=OPTIONS)
        for _ in range(-(-share.count // share.streams_per_connection))
    ]
    open_stream: list[Callable[[], Call]] = [channel.stream_stream(METHOD) for channel in channels]
    calls = [open_stream[i // share.streams_per_connection]() for i in range(share.count)]
    opening = anyio.Semaphore(CONNECTING_MAX)
    async with anyio.create_task_group() as tasks:

        async def greet(node: Node, call: Call) -> None:
            async with opening:
                await call.write(node.hello(time.time()))
                await call.read()

        with anyio.fail_after(CONNECT_TIMEOUT_S):
            async with anyio.create_task_group() as greeting:
                for node, call in zip(nodes, calls, strict=True):
                    greeting.start_soon(greet, node, call)
        for call in calls:
            tasks.start_soon(_hear, call, sent)
        print("connected", flush=True)
        started_at = float(await anyio.to_thread.run_sync(sys.stdin.readline))
        cpu_s = time.process_time()
        async with anyio.create_task_group() as writing:
            for place, (node, call) in enumerate(zip(nodes, calls, strict=True)):
                due = started_at + place / share.count * TICK_S
                writing.start_soon(_speak, share, node, call, place, due, started_at, sent)
        sent.cpu_s = time.process_time() - cpu_s
        tasks.cancel_scope.cancel()
    for channel in channels:
        await channel.close()
    return sent


async def _speak(share: Share, node: Node, call: Call, place: int, due: float, started_at: float, sent: Sent) -> None:
    breaks_at = started_at + (place + 1) * share.broken_every_s
    end = started_at + share.seconds
    while due < end:
        await anyio.sleep(max(0.0, due - time.time()))
        now = time.time()
        if now - due > TICK_S:  # an agent that is held back sends one tick when it can, not all that it missed
            missed = int((now - due) / TICK_S)
            sent.late += missed
            due += missed * TICK_S
        raw = node.tick(now, started_at)
        if breaks_at <= now:
            breaks_at = end + 1.0
            raw = node.broken(now)
        try:
            await call.write(raw)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            sent.refused = sent.refused or f"{node.name}: {error}"[:300]
            return
        sent.ticks += 1
        sent.bytes += len(raw)
        due += TICK_S


async def _hear(call: Call, sent: Sent) -> None:
    try:
        while await call.read() is not grpc.aio.EOF:
            sent.acks += 1
    except grpc.aio.AioRpcError as error:
        sent.refused = sent.refused or f"{error.code().name}: {error.details()}"[:300]


if __name__ == "__main__":
    print(json.dumps(asdict(anyio.run(run, Share(**json.loads(sys.argv[1]))))), flush=True)
