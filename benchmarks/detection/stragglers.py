"""Suite `stragglers`: the real traces as they are, the same with one rank slowed down, and generated jobs on random meshes.

A trace is `stragglers/trace-NAME.parquet` (per-operation timings; ByteDance-Seed/StragglerAnalysis). The production detector
receives what agents would send: the duration of the step and the wait of each rank for the others, one message per node and
step. The slow ranks of a trace are listed in `truth.json` in the same directory, or else in that of tests/data ({"AR": [0]}:
indices among the trace's ranks in order). If a trace is in neither file, no rank is expected to be named.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet  # type: ignore[import-untyped]
from numpy.typing import NDArray

from benchmarks.detection.score import Score
from holdfast.diagnostics.detectors.alone import Alone
from holdfast.diagnostics.detectors.stragglers import Stragglers
from holdfast.domain.findings import FindingKind, Severity, StepRecord
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import GenerationStarted, StepColumns

SLOW = (0.05, 0.10, 0.15, 0.20, 0.30, 0.50)
ASKED = 0.15  # slowdown from which a rank must be found; the score of the suite counts only such ranks
DELAY_MAX = 15  # steps
TRIALS = 40  # injections per trace and slowdown
WORLDS = 60  # generated jobs per slowdown
_NODE = 8  # ranks
_OUR_TRUTH = Path(__file__).parents[2] / "tests" / "data" / "stragglers" / "truth.json"
_T0 = 1_700_000_000.0

Work = NDArray[np.float64]  # steps × ranks, seconds


@dataclass(frozen=True, slots=True)
class Named:
    """The result of the detector: for each rank, the step (by index) at which it was named first."""

    ranks: dict[int, int]
    kinds: frozenset[FindingKind]


def suite(data: Path, rng: np.random.Generator) -> Score:
    score = Score("stragglers", unit="steps")
    asked = []
    for path in sorted((data / "stragglers").glob("trace-*.parquet")):
        name = path.stem.removeprefix("trace-")
        mesh, work = read_trace(path)
        truth = _truth(path.parent / "truth.json", name) or _truth(_OUR_TRUTH, name)
        row = score.row(f"trace {name}")
        _judge(row, name, watch(mesh, work), dict.fromkeys(truth, 0))
        asked.append(row.suite)
        for slow in SLOW:
            row = score.row(f"trace {name} + {slow:.0%}")
            for _ in range(TRIALS):
                _inject(row, mesh, work, truth, slow, rng)
            asked += [row.suite] if slow >= ASKED else []
    for slow in (0.0, *SLOW):
        row = score.row(f"generated + {slow:.0%}" if slow else "generated, clean")
        for _ in range(WORLDS):
            mesh, work = generate(rng)
            if slow:
                _inject(row, mesh, work, (), slow, rng)
            else:
                _judge(row, str(mesh), watch(mesh, work), {})
        asked += [row.suite] if slow >= ASKED or not slow else []
    score.facts |= {
        "scored": f"≥ {ASKED:.0%} slow in ≤ {DELAY_MAX} steps, and what is as it is",
        "cpu_ms_per_step": speed(),
    }
    return score.total(*asked)


def watch(mesh: Mesh, work: Work) -> Named:
    """Run the detector on a job's steps."""
    detector, steps, now = Alone(Stragglers()), work.shape[0], _T0
    named: dict[int, int] = {}
    kinds = set()
    nodes = [tuple(range(i, min(i + _NODE, mesh.world_size))) for i in range(0, mesh.world_size, _NODE)]
    for i, ranks in enumerate(nodes):
        detector.observe(GenerationStarted(f"n{i}", now, "job", 1, mesh, ranks, HangSpec()), now)
    for step in range(-5, steps):  # the first steps of a generation are not judged: the trace's first one, repeated
        own = work[max(0, step)]
        duration = float(own.max()) * 1.02
        for i, ranks in enumerate(nodes):
            item = _columns(f"n{i}", now, step + 6, ranks, own, duration)
            detector.observe(item, now)
        now += duration
        record = StepRecord("job", 1, step + 6, mesh.world_size, now - duration, now, 0, None, 0.0)
        findings = detector.observe(record, now)
        for finding in findings:
            if finding.severity is Severity.INFO:
                continue  # the withdrawal of a condition
            kinds.add(finding.kind)
            if finding.kind is FindingKind.STRAGGLER:
                for rank in finding.evidence["ranks"].split(", "):
                    named.setdefault(int(rank), max(0, step))
    return Named(named, frozenset(kinds))


def _columns(node: str, at: float, step: int, ranks: Sequence[int], own: Work, duration: float) -> StepColumns:
    n = len(ranks)
    return StepColumns(
        node,
        at,
        "job",
        1,
        tuple(ranks),
        (step,) * n,
        (at,) * n,
        (at + duration,) * n,
        (0.0,) * n,
        (0.0,) * n,
        (1,) * n,
        (0.0,) * n,
        (0.0,) * n,
        comm_wait_s=tuple(duration - float(own[rank]) for rank in ranks),
    )


def _judge(row: Score, name: str, result: Named, truth: dict[int, int]) -> None:
    """Compare with the true slow ranks (rank → step of onset)."""
    for rank, onset in truth.items():
        delay = result.ranks[rank] - onset + 1 if rank in result.ranks else None
        if delay is not None and delay <= max(DELAY_MAX, 0 if onset else DELAY_MAX):
            row.hit(delay)
        else:
            row.fail(
                f"{name}: rank {rank} from step {onset} " + ("not found" if delay is None else f"after {delay}"),
                missed=1,
            )
    false = sorted(result.ranks.keys() - truth.keys())
    if false:
        row.fail(f"{name}: false ranks {false}", wrong=len(false), spoiled=not truth)
    elif not truth:
        row.clean += 1


def _inject(row: Score, mesh: Mesh, work: Work, truth: Sequence[int], slow: float, rng: np.random.Generator) -> None:
    """Make one healthy rank slower, from a step that leaves enough time to find it."""
    rank = int(rng.choice([rank for rank in range(mesh.world_size) if rank not in truth]))
    onset = int(rng.integers(0, work.shape[0] - DELAY_MAX))
    hurt = work.copy()
    hurt[onset:, rank] *= 1.0 + slow
    result = watch(mesh, hurt)
    kept = {known: step for known, step in result.ranks.items() if known not in truth}
    _judge(row, f"{mesh}, {slow:.0%}", Named(kept, result.kinds), {rank: onset})


def generate(rng: np.random.Generator) -> tuple[Mesh, Work]:
    """A job of 45 steps with random mesh, noise, sequence imbalance and long last stage."""
    dp, pp, tp = int(rng.choice([2, 4, 8, 16])), int(rng.choice([1, 1, 2, 4])), int(rng.choice([1, 2, 4]))
    mesh, steps = Mesh((("dp", dp), ("pp", pp), ("tp", tp))), 45
    stages = np.ones(pp) + rng.normal(0, 0.02, pp)
    stages[-1] *= rng.choice([1.0, 1.1, 1.5])
    data = rng.normal(0, float(rng.choice([0.0, 0.02, 0.12])) if pp > 1 else 0.02, (steps, dp, 1, 1))
    noise = rng.normal(0, float(rng.choice([0.005, 0.02, 0.04])), (steps, dp, pp, tp))
    nature = rng.normal(0, 0.01, (1, dp, pp, tp))  # machines differ a little
    hiccups = np.where(rng.random((steps, dp, pp, tp)) < 0.005, rng.uniform(0.5, 5.0), 0.0)
    work = rng.uniform(0.2, 20.0) * stages[:, None] * (1 + data) * (1 + noise) * (1 + nature) + hiccups
    return mesh, work.reshape(steps, -1)


def read_trace(path: Path) -> tuple[Mesh, Work]:
    """The forward and backward compute times of each rank in the trace, with a mesh of its replicas and stages."""
    table = pyarrow.parquet.read_table(path, columns=["dp_rank", "stage", "step", "optype", "duration"])
    kind = np.array(table["optype"].to_pylist())
    compute = np.isin(kind, ("forward-compute", "backward-compute"))
    steps, index = np.unique(table["step"].to_numpy()[compute], return_inverse=True)
    replica, stage = table["dp_rank"].to_numpy()[compute], table["stage"].to_numpy()[compute]
    work = np.zeros((len(steps), int(replica.max()) + 1, int(stage.max()) + 1))
    np.add.at(work, (index, replica, stage), table["duration"].to_numpy()[compute])
    whole = (work > 0).all(axis=(1, 2))
    mesh = Mesh((("dp", work.shape[1]), ("pp", work.shape[2])))
    return mesh, work[whole].reshape(int(whole.sum()), -1)


def _truth(path: Path, name: str) -> tuple[int, ...]:
    return tuple(json.loads(path.read_text()).get(name, ())) if path.exists() else ()


def speed(ranks: int = 100_000) -> dict[str, float]:
    """Milliseconds of CPU time for one step of `ranks` ranks, medians of nine steps: with a full window, and before the first
    step is judged, when only the reports of the nodes are collected."""
    mesh = Mesh((("dp", ranks // 64), ("pp", 8), ("tp", 8)))
    rng, detector, now = np.random.default_rng(0), Alone(Stragglers()), _T0
    everyone = tuple(range(mesh.world_size))
    detector.observe(GenerationStarted("n", now, "job", 1, mesh, everyone, HangSpec()), now)
    took = []
    for step in range(1, 28):
        own = rng.normal(1.0, 0.03, mesh.world_size)
        detector.observe(_columns("n", now, step, everyone, own, 1.3), now)
        began = time.thread_time()
        detector.observe(StepRecord("job", 1, step, mesh.world_size, now, now + 1, 0, None, 0.0), now)
        took.append((time.thread_time() - began) * 1e3)
    gather, all_of_it = sorted(took[:3])[1], sorted(took[-9:])[4]
    return {"ranks": mesh.world_size, "gather": round(gather, 1), "score": round(all_of_it - gather, 1)}
