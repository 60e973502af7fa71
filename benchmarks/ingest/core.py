"""Measures the cost of a tick without the network (parsing, decoding, folding, on one core), and of a step of the whole
fleet."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.ingest.fleet import GPUS, JOB, Node
from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.detectors.alone import Alone
from holdfast.diagnostics.detectors.stragglers import Stragglers
from holdfast.diagnostics.engine import Engine
from holdfast.domain.findings import StepRecord
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import ClockTick, GenerationStarted, NodeBeat, NodeConnected, StepColumns
from holdfast.v1 import telemetry_pb2 as pb
from holdfast.wire.telemetry import decode_tick

T0 = 1_700_000_000.0
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Costs:
    """Medians of CPU time over the rounds: microseconds per tick, milliseconds for the rest."""

    parse_us: float
    decode_us: float
    fold_us: float
    clock_ms: float


def ticks(nodes: int, *, step_s: float) -> Costs:
    """Measure a fleet of `nodes` for ROUNDS seconds, in this process."""
    engine = Engine(detectors.standard(xid.load()))
    fleet = [Node(number, nodes, step_s=step_s) for number in range(nodes)]
    for node in fleet:
        engine.fold(NodeConnected(node.name, T0, "a"), T0)
        for signal in decode_tick(pb.Tick.FromString(node.hello(T0))).signals:
            engine.fold(signal, T0)
    rows = []
    for second in range(1, ROUNDS + 1):
        now = T0 + second
        raw = [node.tick(now) for node in fleet]
        began = time.process_time()
        parsed = [pb.Tick.FromString(one) for one in raw]
        parsed_at = time.process_time()
        decoded = [decode_tick(one) for one in parsed]
        decoded_at = time.process_time()
        for tick in decoded:
            engine.fold(NodeBeat(tick.node, now), now)
            for signal in tick.signals:
                engine.fold(signal, now)
        folded_at = time.process_time()
        engine.fold(ClockTick(now), now)
        rows.append(
            (parsed_at - began, decoded_at - parsed_at, folded_at - decoded_at, time.process_time() - folded_at)
        )
    parse, decode, fold, clock = (statistics.median(column) for column in zip(*rows, strict=True))
    each = 1e6 / nodes
    return Costs(each * parse, each * decode, each * fold, clock_ms=1e3 * clock)


def step_of_all_ranks(ranks: int, steps: int = 40) -> list[float]:
    """Return the CPU milliseconds of the straggler detector for each finished step of `ranks` ranks, with a full window."""
    detector, rng = Alone(Stragglers()), np.random.default_rng(7)
    nodes = ranks // GPUS
    mesh = Mesh.of({"dp": nodes, "tp": GPUS})
    for number in range(nodes):
        of_node = tuple(range(number * GPUS, (number + 1) * GPUS))
        started = GenerationStarted(f"n{number}", T0, JOB, 1, mesh, of_node, HangSpec())
        detector.observe(started, T0)
    took_ms = []
    for step in range(1, steps + 1):
        ended_at = T0 + step
        work = rng.normal(0.8, 0.01, ranks)
        for number in range(nodes):
            detector.observe(_columns(number, step, ended_at, work), ended_at)
        record = StepRecord(JOB, 1, step, ranks, ended_at - 1.0, ended_at, ranks * 4096, 2.5, 0.0)
        began = time.process_time()
        findings = detector.observe(record, ended_at)
        took_ms.append(1e3 * (time.process_time() - began))
        if findings:
            raise AssertionError(f"a straggler in an even fleet: {findings[0].summary}")
    return took_ms[steps // 2 :]


def _columns(
    number: int, step: int, ended_at: float, work: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
) -> StepColumns:
    first = number * GPUS
    own = work[first : first + GPUS]
    return StepColumns(
        node=f"n{number}",
        at=ended_at,
        job=JOB,
        generation=1,
        rank=tuple(range(first, first + GPUS)),
        step=(step,) * GPUS,
        started_at=(ended_at - 1.0,) * GPUS,
        ended_at=(ended_at,) * GPUS,
        data_s=(0.01,) * GPUS,
        stall_s=(0.0,) * GPUS,
        tokens=(4096,) * GPUS,
        loss=(2.5,) * GPUS,
        grad_norm=(1.0,) * GPUS,
        comm_wait_s=tuple((1.0 - own).tolist()),
    )
