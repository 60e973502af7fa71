"""Suite `storm`: N of 12,500 nodes fail in the same second, in four ways. The real engine detects the failed nodes, and the
real supervisor core decides the actions.

Time is virtual, but every computation takes as long as its real CPU time, so that the engine and the supervisor (`deciding`)
lag behind the events. `finding` is the delay from fault to finding, `decision` the delay from fault to decision; the delay of
the row is the latter. If more than the circuit breaker's share of the fleet fails, the breaker decides once. Incidents that
wait for a decision are then decided, and later ones are deferred, and count as decided when their findings have been processed.
A node that is out of memory leads to a warning and needs no decision.

Each storm has `DEADLINE_S` of real time on this machine; faults without a decision by then count as missed.
"""

from __future__ import annotations

import itertools
import time

import numpy as np

from benchmarks.detection.deciding import Decisions, decide, running_fleet
from benchmarks.detection.score import Score, delays_of, progress
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
from holdfast.runtime.garbage import collect_seldom

FLEET = 12_500  # nodes
SPARES = 250
STORMS = (150, 750, 12_500)
DEADLINE_S = 120.0  # real time for one storm
_PER_JOB = 8  # nodes, with one rank each, because only findings are measured
_TICK_S = 0.02
_STEP_S = 0.5
_TRAINING_S = 5.0  # before the storm, because jobs without a known step time are judged by other rules
_LASTING_S = 3.0  # a fault counts as missed if it is not found within this time after the last fault
_T0 = 1_700_000_000.0
_KINDS = {
    "crash": FindingKind.WORKER_CRASH,
    "xid": FindingKind.GPU_ERROR,
    "lost": FindingKind.NODE_LOST,
    "oom": FindingKind.HOST_OOM,
}


def suite(rng: np.random.Generator) -> Score:
    collect_seldom()  # as in both services
    score = Score("storm")
    for count in STORMS:
        began = time.monotonic()
        row = score.row(f"{count} nodes")
        _storm(row, count, rng, began + DEADLINE_S)
        row.facts["duration_s"] = round(time.monotonic() - began, 1)
        progress(f"storm of {count} nodes: {row.facts['duration_s']} s")
    return score.total()


def _storm(row: Score, count: int, rng: np.random.Generator, until: float) -> None:
    engine = Engine(detectors.standard(xid.load()))
    jobs = [f"job{i // _PER_JOB}" for i in range(FLEET)]
    for i in range(FLEET):
        mesh = Mesh.of({"dp": min(_PER_JOB, FLEET - i // _PER_JOB * _PER_JOB)})
        engine.fold(NodeConnected(f"n{i}", _T0, "a"), _T0)
        engine.fold(GenerationStarted(f"n{i}", _T0, jobs[i], 1, mesh, (i % _PER_JOB,), HangSpec()), _T0)
    victims = sorted(rng.choice(FLEET, count, replace=False).tolist())
    ways = {victim: str(rng.choice(list(_KINDS))) for victim in victims}
    faults = sorted((_T0 + _TRAINING_S + float(rng.random()), victim) for victim in victims)
    ended: dict[str, float] = {}  # job → when the first of its ranks ended
    for at, victim in faults:
        if ways[victim] in ("crash", "lost"):
            ended.setdefault(jobs[victim], at)
    at_fault: dict[str, float] = {}
    found: list[tuple[float, Finding]] = []  # (when the engine returned it, finding)
    gone: list[tuple[float, str]] = []
    engine_free = _T0
    now, next_fault, cpu_s, talking = _T0, 0, 0.0, itertools.cycle(range(FLEET))
    lost: set[int] = set()
    while now < _T0 + _TRAINING_S + 1 + _LASTING_S and time.monotonic() < until:
        now += _TICK_S
        batch: list[Signal] = [
            signal
            for i in itertools.islice(talking, int(FLEET * _TICK_S))
            if i not in lost
            for signal in (NodeBeat(f"n{i}", now), _progress(i, jobs[i], now, ended.get(jobs[i], now)))
        ]
        while next_fault < len(faults) and faults[next_fault][0] <= now:
            at, victim = faults[next_fault]
            node = f"n{victim}"
            at_fault[node] = at
            if ways[victim] == "lost":
                lost.add(victim)
                gone.append((at, node))  # its control session ends as well
            batch.append(_fault(ways[victim], node, jobs[victim], victim % _PER_JOB, at))
            next_fault += 1
        began = time.process_time()
        concluded = [finding for signal in (*batch, ClockTick(now)) for finding in engine.fold(signal, now).findings]
        spent = time.process_time() - began
        cpu_s += spent
        engine_free = max(engine_free, now) + spent
        found += ((engine_free, finding) for finding in concluded)
    roots: set[str] = set()  # jobs with a root failure
    kinds = {}
    for _, victim in faults:
        way, job = ways[victim], jobs[victim]
        if way == "crash" and job in roots:
            continue  # later crashes of a job are cascading failures: only the first counts, by design
        roots |= {job} if way in ("crash", "lost") else set()
        kinds[f"n{victim}"] = _KINDS[way]
    decisions = decide(running_fleet(FLEET, _PER_JOB, SPARES, _T0), found, gone, until)
    _judge(row, found, decisions, at_fault, kinds)
    row.facts |= {
        "cascades": len(ways) - len(kinds),
        "engine_cpu_s": round(cpu_s, 3),
        "supervisor_s": {what: round(spent, 3) for what, spent in decisions.spent_s.items()},
        "questions": decisions.asked,
        "generation_changes": decisions.changes,
        "held_by_breaker": decisions.held,
        "commits": decisions.batches,
        "commit_kb": round(decisions.commit_bytes / 1024 / max(1, decisions.batches), 1),
    }


def _judge(
    row: Score,
    found: list[tuple[float, Finding]],
    decisions: Decisions,
    at_fault: dict[str, float],
    kinds: dict[str, FindingKind],
) -> None:
    first: dict[str, float] = {}
    for at, finding in found:
        if finding.node not in at_fault:
            row.fail(f"{finding.kind} of {finding.node}: nothing happened there", wrong=1)
        elif finding.kind is kinds.get(finding.node):
            first.setdefault(finding.node, at)
    for node, kind in kinds.items():
        if node not in first:
            row.fail(f"{kind} of {node} not found", missed=1)
        elif kind is FindingKind.HOST_OOM:
            row.hit()
        elif node in decisions.judged and node not in decisions.undecided:
            row.hit(decisions.decided.get(node, decisions.judged[node]) - at_fault[node])
        else:
            row.fail(f"{kind} of {node} never reached a decision", missed=1)
    row.facts["finding"] = delays_of([first[node] - at_fault[node] for node in kinds if node in first], "s")


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


def _progress(i: int, job: str, at: float, ended: float) -> RankProgress:
    rank, step = (i % _PER_JOB,), int((min(at, ended) - _T0) / _STEP_S)
    return RankProgress(
        f"n{i}", at, job, 1, rank, (step,), (Phase.STEP,), (_T0 + step * _STEP_S,), ("S",), (1.0,), (-1,)
    )
