"""Suite `storm`: N of 12,500 nodes fail in the same second, in four ways, and the real engine says which.

Time is virtual: the delay is from the fault to the finding by the engine's own clock, with signals arriving as agents send
them. `cpu_s` is what the engine really computed for all of the second's signals, faults and healthy beats together; the
delay of a real process is the virtual one plus the part of it that was still queued.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.detection.score import Score, delays_of
from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.engine import Engine
from holdfast.domain.findings import Finding, FindingKind
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import (
    ClockTick,
    GenerationStarted,
    KernelEvent,
    KernelLine,
    NodeBeat,
    NodeConnected,
    NodeDisconnected,
    Phase,
    RankProgress,
    Signal,
    WorkerExited,
)

FLEET = 12_500  # nodes
STORMS = (150, 750, 12_500)
_PER_JOB = 8  # nodes; ranks per node: 1, because what is measured is findings
_TICK_S = 0.02
_T0 = 1_700_000_000.0
_KINDS = {
    "crash": FindingKind.WORKER_CRASH,
    "xid": FindingKind.GPU_ERROR,
    "lost": FindingKind.NODE_LOST,
    "oom": FindingKind.HOST_OOM,
}


def suite(rng: np.random.Generator) -> Score:
    score = Score("storm")
    for count in STORMS:
        _storm(score.row(f"{count} nodes"), count, rng)
    return score.total()


def _storm(row: Score, count: int, rng: np.random.Generator) -> None:
    engine = Engine(detectors.standard(xid.load()))
    jobs = [f"job{i // _PER_JOB}" for i in range(FLEET)]
    for i in range(FLEET):
        mesh = Mesh.of({"dp": min(_PER_JOB, FLEET - i // _PER_JOB * _PER_JOB)})
        engine.fold(NodeConnected(f"n{i}", _T0, "a"), _T0)
        engine.fold(GenerationStarted(f"n{i}", _T0, jobs[i], 1, mesh, (i % _PER_JOB,), HangSpec()), _T0)
    victims = sorted(rng.choice(FLEET, count, replace=False).tolist())
    ways = {victim: str(rng.choice(list(_KINDS))) for victim in victims}
    faults = sorted((_T0 + 1 + float(rng.random()), victim) for victim in victims)
    at_fault: dict[str, float] = {}
    found: list[Finding] = []
    now, next_fault, cpu_s, healthy = _T0 + 1, 0, 0.0, FLEET // 50
    while now < _T0 + 4:
        now += _TICK_S
        batch: list[Signal] = [
            signal
            for i in rng.integers(0, FLEET, healthy).tolist()
            if i not in ways
            for signal in (NodeBeat(f"n{i}", now), _progress(i, jobs[i], now))
        ]
        while next_fault < len(faults) and faults[next_fault][0] <= now:
            at, victim = faults[next_fault]
            node = f"n{victim}"
            at_fault[node] = at
            batch.append(_fault(ways[victim], node, jobs[victim], victim % _PER_JOB, at))
            next_fault += 1
        began = time.process_time()
        for signal in (*batch, ClockTick(now)):
            found += engine.fold(signal, now).findings
        cpu_s += time.process_time() - began
    roots: set[str] = set()  # jobs that something has ended
    kinds = {}
    for _, victim in faults:
        way, job = ways[victim], jobs[victim]
        if way == "crash" and job in roots:
            continue  # the second crash of a job is a cascade: only the first counts, by design
        roots |= {job} if way in ("crash", "lost") else set()
        kinds[f"n{victim}"] = _KINDS[way]
    _judge(row, found, at_fault, kinds)
    row.facts["cascades"] = len(ways) - len(kinds)
    row.facts |= {"engine_cpu_s": round(cpu_s, 3), "virtual_s": 3.0, "delay_with_cpu": _worst(row, cpu_s)}


def _worst(row: Score, cpu_s: float) -> object:
    """As if the whole storm's computing came before each verdict: an upper bound."""
    return delays_of([delay + cpu_s for delay in row.delays], "s")


def _judge(row: Score, found: list[Finding], at_fault: dict[str, float], kinds: dict[str, FindingKind]) -> None:
    first: dict[str, float] = {}
    for finding in found:
        if finding.node not in at_fault:
            row.fail(f"{finding.kind} of {finding.node}: nothing happened there", wrong=1)
        elif finding.kind is kinds.get(finding.node):
            first.setdefault(finding.node, finding.at)
    for node, kind in kinds.items():
        if node in first:
            row.hit(first[node] - at_fault[node])
        else:
            row.fail(f"{kind} of {node} not found", missed=1)


def _fault(way: str, node: str, job: str, rank: int, at: float) -> Signal:
    match way:
        case "crash":
            return WorkerExited(node, at, job, 1, rank, 100, None, 11, 5, False)
        case "xid":
            return KernelLine(
                node, at, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", 79, "0000:3b:00", 0
            )
        case "oom":
            text = "Out of memory: Killed process 4242 (python) total-vm:1kB"
            return KernelLine(node, at, text, event=KernelEvent.OOM_KILL)
        case _:
            return NodeDisconnected(node, at)


def _progress(i: int, job: str, at: float) -> RankProgress:
    rank = (i % _PER_JOB,)
    return RankProgress(f"n{i}", at, job, 1, rank, (5,), (Phase.STEP,), (_T0,), ("S",), (1.0,), (-1,))
