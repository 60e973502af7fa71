"""How many nodes one diagnostics process takes: decode and fold of healthy ticks of 8 ranks, without the network.

    python benchmarks/ingest.py [nodes]

Prints the median, minimum and maximum of five rounds, in ticks per second, and how many nodes that is at the tick interval
of an agent. gRPC's own cost per message comes on top (see `transport`, one stream on the loopback).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import anyio
import grpc

from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.engine import Engine
from holdfast.diagnostics.ingest import SERVICE, TelemetryServicer
from holdfast.diagnostics.intake import Intake
from holdfast.diagnostics.publisher import Publisher
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import (
    ClockTick,
    GenerationStarted,
    NodeBeat,
    NodeConnected,
    NodeSignal,
    Phase,
    RankProgress,
    StepColumns,
    Tick,
)
from holdfast.log.memory import MemoryLog
from holdfast.runtime.grpc_channel import open_channel
from holdfast.runtime.grpc_server import listen
from holdfast.v1 import telemetry_pb2 as pb
from holdfast.v1.telemetry_pb2_grpc import TelemetryStub, add_TelemetryServicer_to_server
from holdfast.wire.telemetry import decode_tick, encode_tick

RANKS_PER_NODE = 8
TICK_S = 1.0
ROUNDS = 5
T0 = 1_700_000_000.0


def progress(node: int, step: int, at: float) -> RankProgress:
    n = RANKS_PER_NODE
    ranks = tuple(range(node * n, node * n + n))
    return RankProgress(
        f"n{node}",
        at,
        "gpt",
        1,
        ranks,
        (step,) * n,
        (Phase.STEP,) * n,
        (T0,) * n,
        ("S",) * n,
        (at - T0,) * n,
        (-1,) * n,
    )


def columns(node: int, step: int, at: float) -> StepColumns:
    n = RANKS_PER_NODE
    ranks = tuple(range(node * n, node * n + n))
    return StepColumns(
        f"n{node}",
        at,
        "gpt",
        1,
        ranks,
        (step,) * n,
        (at - 1,) * n,
        (at,) * n,
        (0.0,) * n,
        (0.0,) * n,
        (4096,) * n,
        (2.5,) * n,
        (1.0,) * n,
    )


def round_of(nodes: int, round_: int) -> list[bytes]:
    """One tick per node, every tenth with a finished step, as at one step per second."""
    at = T0 + 1 + round_
    ticks = []
    for node in range(nodes):
        signals: tuple[NodeSignal, ...] = (progress(node, round_, at),)
        if node % 10 == round_ % 10:
            signals = (columns(node, round_ + 1, at), *signals)
        ticks.append(encode_tick(Tick(f"n{node}", "a", round_, at, signals)).SerializeToString())
    return ticks


def decode_and_fold(nodes: int) -> tuple[list[float], list[float], float]:
    """Ticks per second of (decode alone, decode and fold) for each round, and seconds of one clock tick."""
    engine = Engine(detectors.standard(xid.load()))
    mesh = Mesh.of({"dp": nodes * RANKS_PER_NODE})
    for node in range(nodes):
        ranks = tuple(range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE))
        engine.fold(NodeConnected(f"n{node}", T0, "a"), T0)
        engine.fold(GenerationStarted(f"n{node}", T0, "gpt", 1, mesh, ranks, HangSpec()), T0)
    decode, both, clock = [], [], []
    for round_ in range(ROUNDS):
        raw = round_of(nodes, round_)
        now = T0 + 1 + round_
        decode.append(nodes / seconds(partial(decode_all, raw)))
        both.append(nodes / seconds(partial(take_all, engine, raw, now)))
        clock.append(seconds(partial(engine.fold, ClockTick(now), now)))
    return decode, both, statistics.median(clock)


def decode_all(raw: list[bytes]) -> None:
    for item in raw:
        decode_tick(pb.Tick.FromString(item))


def take_all(engine: Engine, raw: list[bytes], now: float) -> None:
    for item in raw:
        tick = decode_tick(pb.Tick.FromString(item))
        engine.fold(NodeBeat(tick.node, now), now)
        for signal in tick.signals:
            engine.fold(signal, now)


async def transport(ticks: int) -> float:
    """Ticks per second of the whole path over gRPC on the loopback: client and server share this process."""
    publisher = Publisher(MemoryLog())
    intake = Intake(Engine(detectors.standard(xid.load())), publisher, clock=time.time)
    servicer = TelemetryServicer(intake, publisher, clock=time.time)

    def register(server: grpc.aio.Server) -> None:
        add_TelemetryServicer_to_server(servicer, server)

    async with listen("127.0.0.1:0", register, services=(SERVICE,)) as at, open_channel(at.endpoint) as channel:
        call = TelemetryStub(channel).Stream()
        messages = [encode_tick(Tick("n0", "a", seq, T0, (progress(0, seq, T0),))) for seq in range(ticks)]
        started = time.perf_counter()
        async with anyio.create_task_group() as tasks:

            async def read() -> None:
                for _ in range(ticks):
                    await call.read()

            tasks.start_soon(read)
            for message in messages:
                await call.write(message)
        return ticks / (time.perf_counter() - started)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    nodes = int(sys.argv[1]) if len(sys.argv) > 1 else 12_500
    decode, both, clock_s = decode_and_fold(nodes)
    print(f"{nodes} nodes x {RANKS_PER_NODE} ranks, ticks per second (median, min, max of {ROUNDS} rounds)")
    for name, rates in (("decode", decode), ("decode + fold", both)):
        median = statistics.median(rates)
        print(f"  {name:14} {median:9,.0f} {min(rates):9,.0f} {max(rates):9,.0f}   {1e6 / median:6.1f} us per tick")
    rate = statistics.median(both)
    print(f"  one clock tick {clock_s * 1e6:9.1f} us")
    print(
        f"  = {rate * TICK_S:,.0f} nodes at a tick every {TICK_S:g} s, {rate:,.0f} nodes at a tick every 1 s, per core"
    )
    print(f"over gRPC, one stream, client in the same process: {anyio.run(transport, 2000):,.0f} ticks per second")


if __name__ == "__main__":
    main()
