"""Suite `hang`: which rank is named if a job hangs. Three kinds of cases, each with the production code:

* recorded flight-recorder dumps of real jobs (`flight_recorder/` of the data), by rank;
* generated hangs as flight recorders show them (`collectives`), passed to the detector as agents report them (`StallSnapshot`);
* generated stalls of which only process states are known, as with an unmodified script or an old torch.

In the cases of the last kind, one rank stops the job in one of several ways while the others wait, spinning (as with NCCL) or
asleep (as with gloo), with the noise of real hosts: some healthy ranks are in state D or R at the time of a report, and CPU
shares vary. In the way `nobody`, no rank is the cause: the network, or a deadlock of all ranks. The delay is the time from the
detector's allowance to the finding.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from benchmarks.detection import collectives
from benchmarks.detection.score import Score
from holdfast.diagnostics import flight_dumps
from holdfast.diagnostics.detectors.alone import Alone
from holdfast.diagnostics.detectors.hang import Hang
from holdfast.domain.collectives import CollectiveRows, StallSnapshot
from holdfast.domain.findings import Finding, FindingKind, StepRecord
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import ClockTick, GenerationStarted, Phase, RankProgress

CASES = 120  # for each way
TRUTH = "fault_injection.log"  # in the directory of a recorded case
_NODE = 8
_TICK_S = 0.5
_T0 = 1_700_000_000.0
_WAYS = ("stopped", "gone", "loops", "sleeps", "storage", "behind", "nobody")
_HANG = HangSpec(floor_s=3.0, init_s=60.0)


@dataclass(slots=True)
class _Rank:
    state: str
    cpu: float  # share of one CPU during the hang
    step: int
    cpu_s: float = 0.0
    count: int = -1  # collectives entered


def suite(data: Path, rng: np.random.Generator) -> Score:
    score = Score("hang")
    for case in sorted((data / "flight_recorder").glob("*/fault_injection.log")):
        _recorded(score.row(f"recorded {case.parent.name}"), case.parent)
    for way in collectives.WAYS:
        row = score.row(f"collectives: {way}")
        while row.cases < CASES:
            _stuck(row, way, rng)
    for way in _WAYS:
        row = score.row(way)
        for _ in range(CASES):
            _case(row, way, rng)
    return score.total()


def _recorded(row: Score, case: Path) -> None:
    """Compare the ranks in which a fault was injected with the ranks that the dumps name."""
    truth = {
        int(rank) for rank in re.findall(r"^Rank (\d+),", (case / TRUTH).read_text(encoding="utf-8"), re.MULTILINE)
    }
    dumps = flight_dumps.read(case)
    verdict = dumps.diagnosis()
    named = set(verdict.ranks) if verdict is not None else set()
    row.facts["says"] = flight_dumps.describe(dumps)
    for rank in sorted(truth | named):
        if rank in truth & named:
            row.hit()
        else:
            row.fail(f"{case.name}: rank {rank} is {'missed' if rank in truth else 'named'}",
                     wrong=rank not in truth, missed=rank in truth)  # fmt: skip


def _stuck(row: Score, way: str, rng: np.random.Generator) -> None:
    mesh = _mesh(rng)
    stuck = collectives.stuck(way, mesh, rng)
    if stuck is None:
        return  # the mesh has no place for this fault
    ranks = [
        _Rank("T" if rank in stuck.silent else "S", 0.0 if rank in stuck.silent else 0.02, 20, count=count)
        for rank, count in enumerate(stuck.counts)
    ]
    finding, after_s = _watch(mesh, ranks, next(iter(stuck.culprits), -1), rng, stuck)
    _judge(row, f"{way} on {mesh}", finding, after_s, next(iter(stuck.culprits), None))


def _mesh(rng: np.random.Generator) -> Mesh:
    sizes = {"dp": [2, 4, 8], "pp": [1, 2, 4], "tp": [1, 2, 4]}
    return Mesh(tuple((name, int(rng.choice(choice))) for name, choice in sizes.items()))


def _case(row: Score, way: str, rng: np.random.Generator) -> None:
    mesh = _mesh(rng)
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
        case "behind":  # it hangs inside the step that the others have finished
            bad.step -= 1
        case _:
            pass
    finding, after_s = _watch(mesh, ranks, culprit, rng)
    _judge(row, f"{way} on {mesh}", finding, after_s, None if way == "nobody" else culprit)


def _judge(row: Score, case: str, finding: Finding | None, after_s: float, expected: int | None) -> None:
    if finding is None:
        row.fail(f"{case}: no verdict", missed=1)
    elif finding.rank == expected and expected is None:
        row.clean += 1
    elif finding.rank == expected:
        row.hit(after_s)
    else:
        row.fail(f"{case}: rank {finding.rank}, not {expected}: {finding.evidence['reason']}",
                 wrong=finding.rank is not None, missed=expected is not None, spoiled=expected is None)  # fmt: skip


def _watch(
    mesh: Mesh, ranks: list[_Rank], culprit: int, rng: np.random.Generator, stuck: collectives.Stuck | None = None
) -> tuple[Finding | None, float]:
    """Simulate ten steps, then the stall. Recorders are read when the stall has lasted for a third of the allowance.

    Returns the finding, and its delay after the allowance.
    """
    detector, now, size = Alone(Hang()), _T0, mesh.world_size
    nodes = [tuple(range(i, min(i + _NODE, size))) for i in range(0, size, _NODE)]
    for i, of_node in enumerate(nodes):
        detector.observe(GenerationStarted(f"n{i}", now, "job", 1, mesh, of_node, _HANG), now)
    for step in range(1, 11):
        now += 0.5
        for i, of_node in enumerate(nodes):
            item = _report(f"n{i}", now, of_node, [_Rank("R", 1.0, step, step * 0.5)] * len(of_node))
            detector.observe(item, now)
        detector.observe(StepRecord("job", 1, step, size, now - 0.5, now, 1, None, 0.0), now)
    stalled_at = now + _TICK_S  # the last change of progress is the first report of the stall
    snapshot_sent = set[int]()
    while now < _T0 + 60:
        now += _TICK_S
        asked = stuck is not None and now > stalled_at + _HANG.floor_s / 3
        for i, of_node in enumerate(nodes):
            shown = []
            for rank in of_node:
                true = ranks[rank]
                true.cpu_s += true.cpu * _TICK_S
                blip = rank != culprit and rng.random() < 0.02
                state_now = str(rng.choice(["D", "R"])) if blip else true.state
                shown.append(_Rank(state_now, 0.0, true.step, true.cpu_s, true.count if asked else -1))
            detector.observe(_report(f"n{i}", now, of_node, shown), now)
            if asked and stuck is not None and i not in snapshot_sent:
                snapshot_sent.add(i)  # one snapshot per node, because nothing changes afterwards
                detector.observe(_snapshot(f"n{i}", now, of_node, stuck), now)
        found = detector.observe(ClockTick(now), now)
        for finding in found:
            if finding.kind is FindingKind.HANG:
                return finding, max(0.0, now - stalled_at - _HANG.floor_s)
    return None, 0.0


def _snapshot(node: str, at: float, of_node: tuple[int, ...], stuck: collectives.Stuck) -> StallSnapshot:
    n, columns = len(of_node), [getattr(stuck.rows, each.name) for each in fields(CollectiveRows)]
    mine = [row for row in zip(*columns, strict=True) if row[0] in of_node]
    rows = CollectiveRows(*zip(*mine, strict=True)) if mine else CollectiveRows.of(())
    answered = tuple(rank not in stuck.silent for rank in of_node)
    return StallSnapshot(node, at, "job", 1, of_node, answered, ("free",) * n, ("",) * n, (True,) * n, ("",) * n, rows)


def _report(node: str, at: float, of_node: tuple[int, ...], shown: list[_Rank]) -> RankProgress:
    n = len(of_node)
    return RankProgress(
        node, at, "job", 1, of_node, tuple(one.step for one in shown), (Phase.STEP,) * n, (_T0,) * n,
        tuple(one.state for one in shown), tuple(one.cpu_s for one in shown),
        tuple(one.count for one in shown),
    )  # fmt: skip
