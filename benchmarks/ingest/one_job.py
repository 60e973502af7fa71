"""Measures the cost of one large job in the detectors: a second of telemetry, and the signals that follow one fault of each
kind.

All signals are processed by `Engine` with the production detectors, without network and codecs. Each value is the CPU time of
the folds of one scenario, whose signals are created in advance. The exponent between the smallest and the largest job shows how
the cost grows: 1 is proportional to the number of nodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.ingest.fleet import GPUS, JOB
from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.engine import Engine
from holdfast.domain.collectives import CollectiveRows, StallSnapshot
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import (
    ClockTick,
    GenerationStarted,
    NodeBeat,
    NodeConnected,
    NodeDisconnected,
    Phase,
    RankProgress,
    Signal,
    StepColumns,
    WorkerError,
    WorkerExited,
)

T0 = 1_700_000_000.0
SMALL_NODES = 1024
TICKS = 50  # clock ticks per second of a service that processes a fault
WARM_UP = 7  # steps, one per second, after which the hang detector knows the duration of steps
FAULTY = 3  # the rank that fails, or that the other ranks wait for
_BUG = WorkerError("ValueError", "bad batch 17", ("/t/train.py:10 <module>", "/t/train.py:7 loss"))
_COLLECTIVE = WorkerError(
    "torch.distributed.DistBackendError", "NCCL communicator was aborted", ("/t/train.py:9 step",)
)


@dataclass(slots=True)
class LargeJob:
    """One job on `nodes` nodes of 8 ranks, in virtual time. `cpu_s` counts folding only."""

    nodes: int
    engine: Engine = field(default_factory=lambda: Engine(detectors.standard(xid.load())))
    now: float = T0
    step: int = 0
    cpu_s: float = 0.0
    found: list[Finding] = field(default_factory=list)

    def __post_init__(self) -> None:
        mesh = Mesh.of({"dp": self.nodes, "tp": GPUS})
        for node in range(self.nodes):
            self.fold([NodeConnected(f"n{node}", T0, "a")])
            self.fold([GenerationStarted(f"n{node}", T0, JOB, 1, mesh, ranks_of(node), HangSpec(), "s1")])
        for _ in range(WARM_UP):
            self.second(steps=True)
        self.cpu_s = 0.0

    def fold(self, signals: Iterable[Signal]) -> None:
        listed = list(signals)
        began = time.process_time()
        for signal in listed:
            self.found += self.engine.fold(signal, self.now).findings
        self.cpu_s += time.process_time() - began

    def second(self, *, steps: bool = False, more: Iterable[Signal] = (), silent: int = -1) -> None:
        """Fold a tick of every node, `more`, and `TICKS` clock ticks in between."""
        self.step += steps
        signals = [signal for node in range(self.nodes) if node != silent for signal in self._tick(node, steps=steps)]
        signals += more
        share = -(-len(signals) // TICKS)
        for i in range(TICKS):
            self.now += 1.0 / TICKS
            self.fold(signals[i * share : (i + 1) * share])
            self.fold([ClockTick(self.now)])

    def _tick(self, node: int, *, steps: bool) -> Iterator[Signal]:
        yield NodeBeat(f"n{node}", self.now)
        yield progress(node, self.now, self.step, 10 * self.step)
        if steps:
            yield columns(node, self.now, self.step)

    def found_of(self, kind: FindingKind) -> Finding:
        """Return the only finding that requires an action. Other findings are an error of this benchmark or of a detector."""
        calls = [finding for finding in self.found if finding.severity in (Severity.ERROR, Severity.FATAL)]
        if [finding.kind for finding in calls] != [kind]:
            raise AssertionError(f"{kind} expected: {[finding.summary for finding in calls]}")
        return calls[0]


def ranks_of(node: int) -> tuple[int, ...]:
    return tuple(range(node * GPUS, (node + 1) * GPUS))


def progress(node: int, at: float, step: int, count: int) -> RankProgress:
    ranks, phases, states = ranks_of(node), (Phase.STEP,) * GPUS, ("S",) * GPUS
    counts = tuple(count - (rank == FAULTY) for rank in ranks)
    steps, since, cpu = (step,) * GPUS, (T0 + step,) * GPUS, (0.02 * (at - T0),) * GPUS
    return RankProgress(f"n{node}", at, JOB, 1, ranks, steps, phases, since, states, cpu, counts)


def columns(node: int, at: float, step: int) -> StepColumns:
    zeros, ends = (0.0,) * GPUS, (T0 + step,) * GPUS
    return StepColumns(
        f"n{node}", at, JOB, 1, ranks_of(node), (step,) * GPUS, (T0 + step - 1,) * GPUS, ends, (0.01,) * GPUS, zeros,
        (4096,) * GPUS, (2.5,) * GPUS, (1.0,) * GPUS, (0.1,) * GPUS, (1.5,) * GPUS,
    )  # fmt: skip


def exit_of(rank: int, at: float, step: int, error: WorkerError) -> WorkerExited:
    return WorkerExited(f"n{rank // GPUS}", at, JOB, 1, rank, 1000 + rank, 1, None, step, False, error)


def dump(node: int, nodes: int, at: float, count: int) -> StallSnapshot:
    """All ranks but `FAULTY` have entered an all_reduce of all ranks. Their tensor-parallel groups are idle."""
    ranks, world = ranks_of(node), f"0-{nodes * GPUS - 1}"
    both = tuple(rank for rank in ranks for _ in range(2))
    late = tuple(rank == FAULTY for rank in ranks)
    rows = CollectiveRows(
        both,
        ("0", "1") * GPUS,
        (world, f"{ranks[0]}-{ranks[-1]}") * GPUS,
        tuple(kind for behind in late for kind in ("" if behind else "all_reduce", "")),
        ("",) * len(both),
        (-1,) * len(both),
        tuple(entered for behind in late for entered in (count - behind, 7)),
        tuple(pending for behind in late for pending in (-1 if behind else count, -1)),
    )
    n = len(ranks)
    return StallSnapshot(
        f"n{node}", at, JOB, 1, ranks, (True,) * n, ("free",) * n, ("futex_wait",) * n, (True,) * n, ("",) * n, rows
    )


# ---------------------------------------------------------------- scenarios


def _second(job: LargeJob) -> None:
    job.second(steps=True)


def _lost_node(job: LargeJob) -> None:
    """The node's stream ends and the other ranks do not progress: three seconds of telemetry."""
    job.fold([NodeDisconnected("n1", job.now)])
    for _ in range(3):
        job.second(silent=1)
    assert job.found_of(FindingKind.NODE_LOST).node == "n1"


def _witnessed_loss(job: LargeJob) -> None:
    """As `_lost_node`, and every rank of the other nodes fails in its next collective."""
    job.fold([NodeDisconnected("n1", job.now)])
    others = (rank for rank in range(job.nodes * GPUS) if rank // GPUS != 1)
    job.second(silent=1, more=[exit_of(rank, job.now, job.step, _COLLECTIVE) for rank in others])
    assert job.found_of(FindingKind.NODE_LOST).node == "n1"


def _crash(job: LargeJob) -> None:
    """One rank raises an exception, and all others fail in their next collective."""
    cascade = (rank for rank in range(job.nodes * GPUS) if rank != FAULTY)
    job.fold([exit_of(FAULTY, job.now, job.step, _BUG)])
    job.second(more=[exit_of(rank, job.now, job.step, _COLLECTIVE) for rank in cascade])
    assert job.found_of(FindingKind.WORKER_EXCEPTION).rank == FAULTY


def _late_root(job: LargeJob) -> None:
    """All other ranks fail in their next collective, and the rank that failed first is reported last, or never."""
    cascade = (rank for rank in range(job.nodes * GPUS) if rank != FAULTY)
    called = WorkerError(_COLLECTIVE.type, _COLLECTIVE.message, (), 0.0, ("0",), (10 * job.step,), ("all_reduce",))
    job.second(more=[exit_of(rank, job.now, job.step, called) for rank in cascade])
    for _ in range(3):
        job.second()
    assert job.found_of(FindingKind.WORKER_EXCEPTION).evidence["root"] == "not seen"


def _hang(job: LargeJob) -> None:
    """No rank progresses; every node reports the dumps of its flight recorders until the finding."""
    count = 10 * job.step
    for second in range(20):
        job.second(more=[dump(node, job.nodes, job.now, count) for node in range(job.nodes)] if second >= 2 else ())
        if any(finding.severity is Severity.ERROR for finding in job.found):
            break
    assert job.found_of(FindingKind.HANG).rank == FAULTY


SCENARIOS: dict[str, Callable[[LargeJob], None]] = {
    "a second of telemetry, with a step": _second,
    "a lost node, and 3 s of telemetry": _lost_node,
    "a lost node that all other ranks fail for": _witnessed_loss,
    "a crash, and all other ranks that fail for it": _crash,
    "all ranks but one fail in a collective": _late_root,
    "a hang with dumps of all ranks": _hang,
}


def measure(sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return CPU seconds by scenario and number of nodes, and as "exponent" the growth from the smallest to the largest job."""
    report = dict[str, dict[str, float]]()
    for name, scenario in SCENARIOS.items():
        row = dict[str, float]()
        for nodes in sizes:
            job = LargeJob(nodes)
            scenario(job)
            row[str(nodes)] = round(job.cpu_s, 3)
        (small, first), *_, (large, last) = ((int(nodes), cpu_s) for nodes, cpu_s in row.items())
        row["exponent"] = round(math.log(max(last, 1e-3) / max(first, 1e-3)) / math.log(large / small), 2)
        report[name] = row
    return report
