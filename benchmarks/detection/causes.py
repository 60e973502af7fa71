"""Suite `user_vs_hardware`: scenarios of failures and restarts (`scenarios/*.yaml`), judged by the whole engine.

A hit: the failure attribution of the last failure agrees with the truth. Wrong: the user or a machine is held responsible
falsely, a job is stopped that must not be stopped, or a node without a fault is taken out of service. `wasted restarts`: the
number of failures between the first one and the stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.detection.fleet import COLLECTIVE
from benchmarks.detection.score import Score
from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.engine import Engine
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import (
    ClockTick,
    GenerationStarted,
    KernelEvent,
    KernelLine,
    NodeBeat,
    NodeConnected,
    Signal,
    StepColumns,
    WorkerError,
    WorkerExited,
)

_T0 = 1_700_000_000.0
_NODES = 4  # one rank each
_MESH = Mesh.of({"dp": _NODES})
_ROOTS = (FindingKind.WORKER_CRASH, FindingKind.WORKER_EXCEPTION, FindingKind.REPEATED_EXCEPTION)


def suite(data: Path) -> Score:
    score = Score("user_vs_hardware", unit="wasted restarts")
    stops, evictions = 0, 0
    for path in sorted((data / "scenarios").glob("*.yaml")):
        for scenario in yaml.safe_load(path.read_text(encoding="utf-8")):
            world = World()
            for failure in scenario["failures"]:
                world.fail(failure)
            falsely_stopped, falsely_evicted = _judge(score, scenario, world)
            stops += falsely_stopped
            evictions += falsely_evicted
    score.facts |= {"false_stops": stops, "false_evictions": evictions}
    return score


def _judge(score: Score, scenario: Mapping[str, Any], world: World) -> tuple[bool, bool]:
    name, truth = scenario["name"], scenario["truth"]
    # A finding that diagnostics repeats because it still holds is not a new conclusion.
    roots = [finding for finding in world.found if finding.kind in _ROOTS and not finding.repeat]
    blamed = roots[-1].evidence.get("blame", "unknown") if roots else "nothing"
    stopped = [i for i, finding in enumerate(roots) if finding.kind is FindingKind.REPEATED_EXCEPTION]
    evicted = any(finding.severity is Severity.FATAL for finding in world.found)
    false_stop, false_eviction = bool(stopped) and not scenario["stop"], evicted and truth != "hardware"
    if false_stop or false_eviction:
        score.fail(f"{name}: {'stopped' if false_stop else 'evicted'}", wrong=1)
    if blamed != truth:
        score.fail(f"{name}: {blamed}, not {truth}", wrong=blamed not in ("unknown", "nothing"), missed=1)
    elif scenario["stop"] and not stopped:
        score.fail(f"{name}: not stopped", missed=1)
    elif truth == "unknown":
        score.clean += 1
    else:
        score.hit(float(stopped[0] - 1) if stopped else None)
    return false_stop, false_eviction


class World:
    """A small fleet that fails as the scenario specifies, in virtual time."""

    def __init__(self) -> None:
        self.engine = Engine(detectors.standard(xid.load()))
        self.now = _T0
        self.found: list[Finding] = []
        self.generations: dict[str, int] = {}
        for i in range(_NODES):
            self.fold(NodeConnected(f"n{i}", self.now, "a"))

    def fold(self, signal: Signal) -> None:
        self.found += self.engine.fold(signal, self.now).findings

    def fail(self, failure: Mapping[str, Any]) -> None:
        job, culprit = failure.get("job", "a"), int(failure["node"])
        generation = self.generations[job] = self.generations.get(job, 0) + 1
        self.now += 120.0
        started = self.now
        for i in range(_NODES):
            self.fold(GenerationStarted(f"n{i}", started, job, generation, _MESH, (i,), HangSpec()))
        self.now = started + failure["after_s"] / 2
        for i in range(_NODES):
            self.step(job, generation, i, failure.get("progress", failure["step"]))
        self.now = started + failure["after_s"] - failure.get("before_s", 1)
        if "xid" in failure:
            text = f"NVRM: Xid (PCI:0000:3b:00): {failure['xid']}, pid=1, name=python, Ch 00000001"
            self.fold(KernelLine(f"n{culprit}", self.now, text, failure["xid"], "0000:3b:00", 0, KernelEvent.XID))
        if "oom" in failure:
            text = "Out of memory: Killed process 4242 (python) total-vm:1kB"
            self.fold(KernelLine(f"n{culprit}", self.now, text, event=KernelEvent.OOM_KILL))
        self.now = started + failure["after_s"]
        error = failure.get("error")
        own = None if error is None else WorkerError(error[0], error[1], (error[2],), self.now)
        self.exit(job, generation, culprit, failure, own, failure.get("signal"))
        for rank in failure.get("echo", ()):
            self.now += 0.01
            self.exit(job, generation, rank, failure, COLLECTIVE, None)
        for _ in range(50):
            self.now += 0.02
            for i in range(_NODES):
                self.fold(NodeBeat(f"n{i}", self.now))
            self.fold(ClockTick(self.now))

    def exit(
        self,
        job: str,
        generation: int,
        rank: int,
        failure: Mapping[str, Any],
        error: WorkerError | None,
        signal: int | None,
    ) -> None:
        code = None if signal is not None else 1
        exited = WorkerExited(
            f"n{rank}", self.now, job, generation, rank, 100 + rank, code, signal, failure["step"], False, error
        )
        self.fold(exited)

    def step(self, job: str, generation: int, rank: int, step: int) -> None:
        if step:
            one = (rank,), (step,), (self.now - 1,), (self.now,), (0.0,), (0.0,), (1,), (1.0,), (1.0,)
            self.fold(StepColumns(f"n{rank}", self.now, job, generation, *one))
