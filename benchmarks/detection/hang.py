"""Suite `hang`: generated stalls on random dp × pp × tp meshes, as agents report them, through the production detector.

One rank stops the job in one of several ways while the others wait, busily (as NCCL does) or asleep (as gloo does), with the
noise of real hosts: some healthy ranks are in D or R at the moment of a report, CPU shares vary. In the last way nobody is to
blame: the network, or a deadlock of everybody. The delay is from the detector's threshold to the verdict.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.detection.score import Score
from holdfast.diagnostics.detectors.hang import Hang
from holdfast.domain.findings import Finding, FindingKind, StepRecord
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import ClockTick, GenerationStarted, Phase, RankProgress

CASES = 120  # of each way
_NODE = 8
_TICK_S = 0.5
_T0 = 1_700_000_000.0
_WAYS = ("stopped", "gone", "loops", "sleeps", "storage", "behind", "nobody")
_HANG = HangSpec(floor_s=3.0, init_s=60.0)


@dataclass(slots=True)
class _Rank:
    state: str
    cpu: float  # share of one CPU while the job stands
    step: int
    cpu_s: float = 0.0


def suite(rng: np.random.Generator) -> Score:
    score = Score("hang")
    for way in _WAYS:
        row = score.row(way)
        for _ in range(CASES):
            _case(row, way, rng)
    return score.total()


def _case(row: Score, way: str, rng: np.random.Generator) -> None:
    mesh = Mesh(
        (("dp", int(rng.choice([2, 4, 8]))), ("pp", int(rng.choice([1, 2, 4]))), ("tp", int(rng.choice([1, 2, 4]))))
    )
    size, culprit = mesh.world_size, int(rng.integers(mesh.world_size))
    spinning = way == "sleeps" or (way not in ("loops", "nobody") and bool(rng.random() < 0.5))
    ranks = [
        _Rank("R" if spinning else "S", float(rng.uniform(0.8, 1) if spinning else rng.uniform(0, 0.08)), 20)
        for _ in range(size)
    ]
    bad = ranks[culprit]
    match way:
        case "stopped":
            bad.state, bad.cpu = "T", 0.0
        case "gone":
            bad.state, bad.cpu = "Z", 0.0
        case "loops":
            bad.state, bad.cpu = "R", 1.0
        case "sleeps":
            bad.state, bad.cpu = "S", float(rng.uniform(0, 0.05))
        case "storage":
            bad.state, bad.cpu = "D", 0.0
        case "behind":  # it died inside the step that the others have left
            bad.step -= 1
        case _:
            pass
    finding, after_s = _watch(mesh, ranks, culprit, rng)
    expected = None if way == "nobody" else culprit
    if finding is None:
        row.fail(f"{way} on {mesh}: no verdict", missed=1)
    elif finding.rank == expected and expected is None:
        row.clean += 1
    elif finding.rank == expected:
        row.hit(after_s)
    else:
        row.fail(f"{way} on {mesh}: rank {finding.rank}, not {expected}: {finding.evidence['reason']}",
                 wrong=finding.rank is not None, missed=expected is not None, spoiled=expected is None)  # fmt: skip


def _watch(mesh: Mesh, ranks: list[_Rank], culprit: int, rng: np.random.Generator) -> tuple[Finding | None, float]:
    """Ten good steps, then the stall. Returns the verdict, and how long after the threshold it came."""
    detector, now, size = Hang(), _T0, mesh.world_size
    state = detector.initial()
    nodes = [tuple(range(i, min(i + _NODE, size))) for i in range(0, size, _NODE)]
    for i, of_node in enumerate(nodes):
        state, _ = detector.observe(state, GenerationStarted(f"n{i}", now, "job", 1, mesh, of_node, _HANG), now)
    for step in range(1, 11):
        now += 0.5
        for i, of_node in enumerate(nodes):
            item = _report(f"n{i}", now, of_node, [_Rank("R", 1.0, step, step * 0.5)] * len(of_node))
            state, _ = detector.observe(state, item, now)
        state, _ = detector.observe(state, StepRecord("job", 1, step, size, now - 0.5, now, 1, None, 0.0), now)
    stalled_at = now + _TICK_S  # the last change of progress is the first report of the stall
    while now < _T0 + 60:
        now += _TICK_S
        for i, of_node in enumerate(nodes):
            shown = []
            for rank in of_node:
                true = ranks[rank]
                true.cpu_s += true.cpu * _TICK_S
                blip = rank != culprit and rng.random() < 0.02
                shown.append(_Rank(str(rng.choice(["D", "R"])) if blip else true.state, 0.0, true.step, true.cpu_s))
            state, _ = detector.observe(state, _report(f"n{i}", now, of_node, shown), now)
        state, found = detector.observe(state, ClockTick(now), now)
        for finding in found:
            if finding.kind is FindingKind.HANG:
                return finding, max(0.0, now - stalled_at - _HANG.floor_s)
    return None, 0.0


def _report(node: str, at: float, of_node: tuple[int, ...], shown: list[_Rank]) -> RankProgress:
    n = len(of_node)
    return RankProgress(
        node, at, "job", 1, of_node, tuple(one.step for one in shown), (Phase.STEP,) * n, (_T0,) * n,
        tuple(one.state for one in shown), tuple(one.cpu_s for one in shown), (-1,) * n,
    )  # fmt: skip
