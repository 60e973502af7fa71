"""Suite `hang_gloo`: real processes that communicate by gloo on dp × pp × tp meshes, one of which fails. The agent's worker
pool runs and observes them, and the detectors of diagnostics judge; only gRPC is left out. The delay is the time from the
allowance of the hang to the finding.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import anyio
import numpy as np

from benchmarks.detection.score import Score
from holdfast.agent.workers.environment import Site, inherited_environment
from holdfast.agent.workers.pool import WorkerPool
from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.engine import Engine
from holdfast.domain.errors import Unavailable
from holdfast.domain.findings import Finding, Severity
from holdfast.domain.generations import Placement
from holdfast.domain.job import CheckpointSpec, HangSpec, LaunchSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.orders import Prepare
from holdfast.domain.signals import ClockTick, NodeBeat, NodeConnected, NodeSignal

MESHES = (
    {"dp": 2, "pp": 2, "tp": 1},
    {"dp": 2, "pp": 1, "tp": 2},
    {"dp": 3, "pp": 1, "tp": 1},
    {"dp": 1, "pp": 3, "tp": 1},
)
MISMATCHED = {"dp": 4, "pp": 1, "tp": 1}  # more than two ranks: if two differ, neither can be named
WAYS = ("SIGSTOP", "GIL lock", "endless loop", "data never comes", "exit", "mismatch")  # arguments of `gloo_train.py`
RUNS = 2  # for each way
WARM_TIMEOUT_S = 120.0
VERDICT_TIMEOUT_S = 60.0
_HANG = HangSpec(floor_s=3.0, init_s=60.0)
_TICK_S, _CLOCK_S = 1.0, 0.02  # as in the agent and in diagnostics
_NODE = "n0"
_SCRIPT = Path(__file__).parent / "gloo_train.py"


def suite(rng: np.random.Generator) -> Score:
    return anyio.run(_suite, rng)


async def _suite(rng: np.random.Generator) -> Score:
    score = Score("hang_gloo")
    root = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    memory = Path(tempfile.mkdtemp(prefix="holdfast-bench-", dir="/dev/shm"))
    signals: list[NodeSignal] = []
    site = Site(root, memory, root / "disk", root / "notes.sock", "")
    pool = WorkerPool(
        node=_NODE,
        address="127.0.0.1",
        site=site,
        inherited=inherited_environment({"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}),
        emit=signals.append,
        report=lambda report: None,
        ended=anyio.Event(),
    )
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.run)
            await _warm(pool)
            for way in WAYS:
                row = score.row(way)
                for number in range(RUNS):
                    await _run(row, pool, signals, way, f"{way.split()[0].lower()}{number}", rng)
            tasks.cancel_scope.cancel()
    finally:
        shutil.rmtree(root, ignore_errors=True)
        shutil.rmtree(memory, ignore_errors=True)
    return score.total()


async def _warm(pool: WorkerPool) -> None:
    """Wait until workers can be forked: torch is imported once, before the first case."""
    with anyio.fail_after(WARM_TIMEOUT_S):
        while True:
            try:
                return await pool.warm("warm-up", LaunchSpec(script=str(_SCRIPT)))
            except Unavailable:
                await anyio.sleep(0.1)


async def _run(
    row: Score, pool: WorkerPool, signals: list[NodeSignal], way: str, job: str, rng: np.random.Generator
) -> None:
    mesh = Mesh.of(MISMATCHED if way == "mismatch" else MESHES[int(rng.integers(len(MESHES)))])
    culprit, step = int(rng.integers(mesh.world_size)), int(rng.integers(10, 30))
    order = Prepare(
        job=job,
        generation=1,
        attempt=1,
        mesh=mesh,
        placement=Placement(0, _NODE, 0, mesh.world_size),
        nnodes=1,
        launch=LaunchSpec(script=str(_SCRIPT), args=(way, str(culprit), str(step))),
        checkpoint=CheckpointSpec(),
        hang=_HANG,
        token=job,
        restore_step=0,
    )
    signals.clear()
    await pool.fork(order)
    try:
        host, _, port = pool.master_of(job, 1).rpartition(":")
        pool.start(job, 1, (host, int(port)), ())
        finding = await _watch(pool, signals)
    finally:
        await pool.stop(job, 1)
    _judge(row, f"{way} at rank {culprit} of {mesh}", finding, culprit)


async def _watch(pool: WorkerPool, signals: list[NodeSignal]) -> Finding | None:
    """Pass the signals of the pool to the detectors, as telemetry would, until a finding would open an incident."""
    engine = Engine(detectors.standard(xid.load()))
    began = ticked = time.time()
    engine.fold(NodeConnected(_NODE, began, "bench"), began)
    while (now := time.time()) < began + VERDICT_TIMEOUT_S:
        found = list(engine.fold(ClockTick(now), now).findings)
        if now >= ticked + _TICK_S:
            ticked = now
            arrived, signals[:] = [*signals, *pool.sample(now)], []
            for signal in (NodeBeat(_NODE, now), *sorted(arrived, key=lambda signal: signal.at)):
                found += engine.fold(signal, now).findings
        for finding in found:
            if finding.severity in (Severity.ERROR, Severity.FATAL):
                return finding
        await anyio.sleep(_CLOCK_S)
    return None


def _judge(row: Score, case: str, finding: Finding | None, culprit: int) -> None:
    if finding is None:
        row.fail(f"{case}: no verdict in {VERDICT_TIMEOUT_S:g} s", missed=1)
    elif finding.rank == culprit:
        late_s = float(finding.evidence.get("still_s", 0)) - float(finding.evidence.get("allowance_s", 0))
        row.hit(max(0.0, late_s))
        row.facts["says"] = finding.summary
    else:
        row.fail(f"{case}: {finding.summary}", wrong=finding.rank is not None, missed=1)
