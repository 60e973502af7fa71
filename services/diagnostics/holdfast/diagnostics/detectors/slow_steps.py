"""Evaluates a window of judged steps: the slow ranks, the reason and the cost, and other reasons for long steps.

Steps come from `stragglers`, the arithmetic over ranks from `comparison`. This module writes the texts and the evidence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from holdfast.diagnostics.detectors import comparison
from holdfast.diagnostics.detectors.comparison import Floats, Grid, Outliers
from holdfast.diagnostics.thresholds import StragglerThresholds
from holdfast.domain.findings import FindingKind

_RANKS_IN_EVIDENCE_MAX = 32


@dataclass(frozen=True, slots=True)
class Judged:
    """One finished step, as arrays of stages × comparison group."""

    step: int
    work: Floats  # seconds
    over: Floats  # excess, not limited
    data: Floats  # seconds of waiting for data
    stage_s: Floats  # work of each stage: the lower median, so that one slow rank of two does not make its stage slow
    worst: Floats  # largest excess of each stage, within ±clip
    duration_s: float  # median over a sample of the ranks
    last_wait_s: float  # shortest wait of any rank; NaN = not measured


@dataclass(slots=True)
class Window:
    """The newest steps of a generation, and a summary of earlier ones."""

    grid: Grid
    node_of: Mapping[int, str]  # by rank, as far as nodes have reported their ranks
    steps: deque[Judged]
    usual_wait_s: list[float] = field(default_factory=list)  # the shortest wait of any rank, in the first steps


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition that holds now. `key` distinguishes the condition from others of the same generation."""

    key: str
    kind: FindingKind
    what: str  # the summary after the job's name, without the full stop
    since: int  # step
    evidence: dict[str, str]
    node: str = ""
    rank: int | None = None
    confidence: float = 0.9
    cost_share: float | None = None  # share of the job's rate
    members: frozenset[int] = frozenset()  # ranks


def conditions(window: Window, found: Outliers, limits: StragglerThresholds) -> Iterator[Condition]:
    """All conditions that hold now."""
    yield from _slow_nodes(window, found)
    if not found.is_slow.any():  # a slow rank also makes its stage long and its replica uneven
        yield from _loaded(window, found, limits)
        yield from _long_stage(window, limits)
    yield from _slow_collective(window, limits)


def _slow_nodes(window: Window, found: Outliers) -> Iterator[Condition]:
    """The slow ranks, grouped by node because nodes can be replaced."""
    nodes: dict[str, list[int]] = {}
    order = np.argsort(-found.adjusted, kind="stable")
    flat = window.grid.ranks.reshape(window.grid.stages, -1)
    for i in order[found.is_slow[order]].tolist():
        rank = int(flat[found.stage[i], found.peer[i]])
        nodes.setdefault(window.node_of.get(rank) or f"the node of rank {rank}", []).append(i)
    for node, entries in nodes.items():
        worst = entries[0]
        stage, peer = int(found.stage[worst]), int(found.peer[worst])
        ranks = [int(flat[found.stage[i], found.peer[i]]) for i in entries]
        excess = np.array([one.over[stage, peer] for one in window.steps])
        start = comparison.began(excess)
        slow = float(np.median(excess[start:]))
        waiting = _data_share(window, stage, peer, start)
        others = window.grid.group_size - 1
        against = f"its {others} peer{'s' if others > 1 else ''}" if others else "its own past"
        cause = "data_loading" if waiting > 0.5 else ("own_past" if not others else "slow_worker")
        why = ", because its data arrives late" if cause == "data_loading" else ""
        cost = _cost(window, {(int(found.stage[i]), int(found.peer[i])) for i in entries})
        more = f" (so are ranks {_list(ranks[1:])})" if len(ranks) > 1 else ""
        yield Condition(
            key=f"node:{node}",
            kind=FindingKind.STRAGGLER,
            what=f"is slowed down by rank {ranks[0]} on {node}{more}: it needs {slow:.0%} longer than {against}{why},"
            f" which costs {cost:.1%} of each step",
            since=window.steps[start].step,
            evidence={
                "cause": cause,
                "slowdown": f"{slow:.4f}",
                "cost_share_of_step": f"{cost:.4f}",
                "score": f"{found.adjusted[worst]:.4f}",
                "bar": f"{found.bar[worst]:.4f}",
                "ranks": _list(ranks),
                "stage": str(stage),
                "peers": str(others),
                "measured": "work" if not math.isnan(window.steps[-1].last_wait_s) else "data wait only",
            },
            node="" if node.startswith("the node of") else node,
            rank=ranks[0],
            cost_share=cost,
            members=frozenset(ranks),
        )


def _data_share(window: Window, stage: int, peer: int, start: int) -> float:
    """The share of the excess that is waiting for data."""
    shares = []
    for one in list(window.steps)[start:]:
        late = one.data[stage, peer] - np.median(one.data[stage])
        excess = one.work[stage, peer] * one.over[stage, peer] / (1.0 + one.over[stage, peer])
        shares.append(float(late / excess) if excess > 0 else 0.0)
    return float(np.median(shares))


def _cost(window: Window, slow: set[tuple[int, int]]) -> float:
    """The share of a step that the job would gain if these ranks were as fast as the slowest other rank of their stage."""
    shares = []
    rows, columns = (list(index) for index in zip(*sorted(slow), strict=True))
    for one in window.steps:
        without = one.work.copy()
        without[rows, columns] = 0.0
        excess = one.over[rows, columns]
        alone = window.grid.group_size == len(rows) or window.grid.group_size == 1
        normal = one.work[rows, columns] / (1.0 + excess) if alone else without[rows].max(axis=1)
        shares.append(max(0.0, float((one.work[rows, columns] - normal).max())) / one.duration_s)
    return float(np.median(shares))


def _loaded(window: Window, found: Outliers, limits: StragglerThresholds) -> Iterator[Condition]:
    """Ranks whose data explains why they are slow: the same ranks in each step, or varying ranks."""
    flat = window.grid.ranks.reshape(window.grid.stages, -1)
    ranks = [int(flat[found.stage[i], found.peer[i]]) for i in np.nonzero(found.is_loaded)[0].tolist()]
    uneven = float(np.mean([one.worst for one in window.steps]))
    if not ranks and (uneven < limits.imbalance or found.explained < 0.5):
        return
    who = (
        f"ranks {_list(ranks)} get more of it than the others" if ranks else "in every step other ranks get more of it"
    )
    yield Condition(
        key="data",
        kind=FindingKind.IMBALANCE,
        what=f"loses time to uneven data: {who}; the slowest rank of a stage works {uneven:.0%} longer than its peers",
        since=window.steps[0].step,
        evidence={
            "cause": "data",
            "slowest_over_median": f"{uneven:.4f}",
            "explained_by_data": f"{found.explained:.4f}",
            "ranks": _list(ranks),
        },
    )


def _long_stage(window: Window, limits: StragglerThresholds) -> Iterator[Condition]:
    if window.grid.stages < 2 or math.isnan(window.steps[-1].last_wait_s):
        return
    seconds = np.median(np.stack([one.stage_s for one in window.steps]), axis=0)
    longest = int(np.argmax(seconds))
    over = float(seconds[longest] / np.mean(np.delete(seconds, longest)) - 1.0)
    if over < limits.imbalance:
        return
    yield Condition(
        key="stage",
        kind=FindingKind.IMBALANCE,
        what=f"has an uneven pipeline: stage {longest} works {over:.0%} longer than the others",
        since=window.steps[0].step,
        evidence={"cause": "stage", "stage": str(longest), "seconds": " ".join(f"{s:.4f}" for s in seconds[:64])},
    )


def _slow_collective(window: Window, limits: StragglerThresholds) -> Iterator[Condition]:
    """A longer wait on all ranks. The rank that waits least waits for no other rank; its wait is the communication itself."""
    waits = np.array([one.last_wait_s for one in window.steps])
    if np.isnan(waits).any():
        return
    if len(window.usual_wait_s) < limits.window:
        window.usual_wait_s.append(float(waits[-1]))
        return
    usual, noise = float(np.median(window.usual_wait_s)), float(np.std(window.usual_wait_s))
    grown, duration_s = float(np.median(waits)) - usual, float(np.median([one.duration_s for one in window.steps]))
    if grown < max(limits.collective * duration_s, limits.z * noise / math.sqrt(len(waits))):
        return
    yield Condition(
        key="collective",
        kind=FindingKind.SLOW_COLLECTIVE,
        what=f"waits {grown:.3f} s longer for communication in each step than it used to ({usual:.3f} s), on every rank",
        since=window.steps[comparison.began(waits)].step,
        evidence={"cause": "collective", "usual_s": f"{usual:.4f}", "now_s": f"{usual + grown:.4f}"},
        confidence=0.7,
        cost_share=grown / duration_s,
    )


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:_RANKS_IN_EVIDENCE_MAX])) + (" …" if len(ranks) > _RANKS_IN_EVIDENCE_MAX else "")
