"""Stragglers: ranks that are slower than their peers step after step, and what else makes steps long.

Theory of operation, per (job, generation). Each rank's *own work* in a step is the step's duration without what it waited for
other ranks (`comm_wait_s`). In synchronous training all ranks' steps take equally long, so where nobody measures that wait
only the time that a rank waited for its data can be told apart: own work is then that, on top of the shortest remainder.

When every rank has finished a step it is laid out by pipeline stage and compared (`peers`). Over a window of steps follows

* a rank slower than its peers whatever its data: STRAGGLER, with the excess, since which step, and what the job would gain
  without its node; slow data loading is told from slow work;
* ranks that are slow as their data explains, or a stage that is longer than the others: IMBALANCE, which blames nobody;
* even the last rank waits longer than it used to: SLOW_COLLECTIVE, the network.

Where a stage has one rank only, ranks are compared with their own past and with how the others' pasts went on.

All are warnings: the job runs on. A condition that goes and comes back within `quiet_steps` is flapping, which is said once.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from holdfast.diagnostics.detectors import peers
from holdfast.diagnostics.detectors.peers import Floats, Grid, Outliers
from holdfast.diagnostics.detectors.protocol import JobBegan, Observed
from holdfast.diagnostics.detectors.recurring import Recurring
from holdfast.diagnostics.thresholds import StragglerThresholds
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity, StepRecord
from holdfast.domain.signals import GenerationStarted, StepColumns

_RANKS_MAX = 1_000_000  # over all generations that are watched; the oldest generation is given up first
_OPEN_MAX = 8  # steps that wait to be complete; ranks are never this far apart
_RANKS_IN_EVIDENCE_MAX = 32
_WARM_UP = 3  # first steps of a generation: they compile and allocate
_WAIT, _DATA, _TOKENS, _DURATION = range(4)

Key = tuple[str, int]  # (job, generation)


@dataclass(frozen=True, slots=True)
class _Judged:
    """One finished step as stages × peers."""

    step: int
    work: Floats  # seconds
    over: Floats  # excess, not limited
    data: Floats  # seconds waited for data
    stage_s: Floats  # work of each stage: the lower median, so that one slow rank of two is not its stage
    duration_s: float  # median over the ranks
    last_wait_s: float  # wait of the rank that waited least; NaN = not measured


@dataclass(slots=True)
class _Run:
    mesh_ranks: int
    grid: Grid
    node_of: list[str]
    window: deque[_Judged]
    raw: Floats  # a ring over the window: excess and its covariate within ±clip, steps × stages × peers
    cause: Floats
    alone: bool  # stages of one rank: judged by their past
    finished: int = 0  # steps
    judged: int = 0
    open: dict[int, NDArray[np.float64]] = field(default_factory=dict)  # step → what its ranks have reported so far
    closed: int = 0  # newest step that was judged
    past: list[Floats] = field(default_factory=list)  # work of the first steps, until `usual` is known
    usual: Floats | None = None
    usual_wait_s: list[float] = field(default_factory=list)
    said: Recurring = field(default_factory=Recurring)


@dataclass(slots=True)
class StragglerState:
    runs: OrderedDict[Key, _Run] = field(default_factory=OrderedDict)


@dataclass(frozen=True, slots=True)
class Stragglers:
    """STRAGGLER, IMBALANCE and SLOW_COLLECTIVE."""

    limits: StragglerThresholds = field(default_factory=StragglerThresholds)

    @property
    def reads(self) -> tuple[type[Observed], ...]:
        return (StepColumns, StepRecord, GenerationStarted, JobBegan)

    def initial(self) -> StragglerState:
        return StragglerState()

    def observe(self, state: StragglerState, item: Observed, now: float) -> tuple[StragglerState, tuple[Finding, ...]]:
        match item:
            case StepColumns():
                _collect(state.runs.get((item.job, item.generation)), item)
            case StepRecord():
                run = state.runs.get((item.job, item.generation))
                if run is not None:
                    return state, self._finished(run, item, now)
            case GenerationStarted():
                _open(state, item, self.limits.window)
            case JobBegan():
                for key in [key for key in state.runs if key[0] == item.job]:
                    del state.runs[key]
            case _:
                pass
        return state, ()

    def _finished(self, run: _Run, record: StepRecord, now: float) -> tuple[Finding, ...]:
        run.finished += 1
        columns = _close(run, record.step)
        judged = self._judge(run, record.step, columns) if run.finished > _WARM_UP else None
        if judged is None:
            return ()
        run.window.append(judged)
        run.judged += 1
        if len(run.window) < self.limits.window_min:
            return ()
        found = list(self._conclude(run))
        return tuple(
            _finding(record, condition, times, now)
            for condition, times in run.said.news(
                found, record.step, now, self.limits.quiet_steps, self.limits.repeat_s
            )
        )

    def _judge(self, run: _Run, step: int, columns: NDArray[np.float64]) -> _Judged | None:
        """The step as work of each rank and excess over its peers; None when it cannot be compared."""
        unheard = np.isnan(columns[_DURATION])
        if unheard.mean() > self.limits.missing:
            return None
        if unheard.any():  # telemetry may be dropped: a rank that is not heard is taken to be like the others
            columns[:, unheard] = np.median(columns[:, ~unheard], axis=1, keepdims=True)
        wait, data, duration = columns[_WAIT], columns[_DATA], columns[_DURATION]
        measured = not np.isnan(wait).any()
        own = np.maximum(duration - wait, data) if measured else (duration - data).min() + data
        if not (own > 0).all():
            return None  # a clock was set back
        grid, work = run.grid, run.grid.lay(own)
        if run.alone:
            compared = _against_past(run, work, self.limits.window)
            if compared is None:
                return None
            over, cause = compared, np.zeros_like(compared)
        else:
            over = peers.excess(work)
            effect = peers.data_effect(over, grid)
            cause = peers.excess(grid.lay(np.maximum(columns[_TOKENS], 1.0))) if effect is None else effect
        slot, clip = run.judged % self.limits.window, self.limits.clip
        np.clip(over, -clip, clip, out=run.raw[slot])
        np.clip(cause, -clip, clip, out=run.cause[slot])
        return _Judged(
            step=step,
            work=work,
            over=over,
            data=grid.lay(data),
            stage_s=np.partition(work, (grid.peers - 1) // 2, axis=1)[:, (grid.peers - 1) // 2],
            duration_s=float(np.median(duration)),
            last_wait_s=float(wait.min()) if measured else math.nan,
        )

    def _conclude(self, run: _Run) -> Iterator[_Condition]:
        limits = self.limits
        over = run.raw[: len(run.window)]
        found = peers.outliers(over, run.cause[: len(run.window)], limits)
        yield from _slow_nodes(run, found)
        if not found.is_slow.any():  # a slow rank makes its stage long and its replica uneven
            yield from _loaded(run, found, over, limits)
            yield from _long_stage(run, limits)
        yield from _slow_collective(run, limits)


# ---------------------------------------------------------------- what arrives


def _open(state: StragglerState, item: GenerationStarted, window: int) -> None:
    key = (item.job, item.generation)
    run = state.runs.get(key)
    if run is None:
        for old in [old for old in state.runs if old[0] == item.job and old[1] < item.generation]:
            del state.runs[old]
        grid, size = Grid.of(item.mesh), item.mesh.world_size
        alone, ring = grid.peers == 1, (window, grid.stages, grid.peers)
        run = state.runs[key] = _Run(
            size, grid, [""] * size, deque(maxlen=window), np.zeros(ring, np.float32), np.zeros(ring, np.float32), alone
        )
        while sum(run.mesh_ranks for run in state.runs.values()) > _RANKS_MAX and len(state.runs) > 1:
            state.runs.popitem(last=False)
    for rank in item.ranks:
        if 0 <= rank < run.mesh_ranks:
            run.node_of[rank] = item.node


def _collect(run: _Run | None, item: StepColumns) -> None:
    """The hot path: every node, every step. Reports go to their place at once, so that judging a step finds a whole table.

    Telemetry of a step that nobody came to read is dropped, the oldest first.
    """
    if run is None or not item.step:
        return
    wait = item.comm_wait_s or (math.nan,) * len(item.rank)
    rows = np.array((wait, item.data_s, item.tokens, item.ended_at), np.float64)
    rows[_DURATION] -= item.started_at
    ranks = np.array(item.rank)
    for step in set(item.step):
        if step <= run.closed:
            continue  # it came after its step was judged
        columns = run.open.get(step)
        if columns is None:
            columns = run.open[step] = np.full((4, run.mesh_ranks), math.nan)
            if len(run.open) > _OPEN_MAX:
                del run.open[min(run.open)]
        here = ranks < run.mesh_ranks
        if len(item.step) > 1:
            here &= np.array(item.step) == step
        columns[:, ranks[here]] = rows[:, here]


def _close(run: _Run, step: int) -> NDArray[np.float64]:
    """What every rank reported of `step`: a row for each of _WAIT … _DURATION, NaN where nothing was reported."""
    columns = run.open.get(step)
    run.closed = max(step, run.closed)
    for old in [old for old in run.open if old <= run.closed]:
        del run.open[old]
    return np.full((4, run.mesh_ranks), math.nan) if columns is None else columns


def _against_past(run: _Run, work: Floats, steps: int) -> Floats | None:
    """Each rank's work over what it used to be, over what the others' became; None while the past is being learnt."""
    if run.usual is None:
        run.past.append(work)
        if len(run.past) == steps:
            run.usual = np.median(np.stack(run.past), axis=0)
            run.past.clear()
        return None
    grown = (work / run.usual).reshape(1, -1)
    over = peers.excess(grown) if grown.shape[1] > 1 else grown - np.float32(1.0)
    return over.reshape(work.shape)


# ---------------------------------------------------------------- what follows from a window


@dataclass(frozen=True, slots=True)
class _Condition:
    """One thing that is so now. `key` tells it from others of the same generation."""

    key: str
    kind: FindingKind
    what: str  # after the job's name, up to the full stop
    since: int  # step
    evidence: dict[str, str]
    node: str = ""
    rank: int | None = None
    confidence: float = 0.9
    members: frozenset[int] = frozenset()  # ranks that are concerned


def _slow_nodes(run: _Run, found: Outliers) -> Iterator[_Condition]:
    """The slow ranks by node, because a node is what can be replaced."""
    nodes: dict[str, list[int]] = {}
    order = np.argsort(-found.adjusted, kind="stable")
    flat = run.grid.ranks.reshape(run.grid.stages, -1)
    for i in order[found.is_slow[order]].tolist():
        rank = int(flat[found.stage[i], found.peer[i]])
        nodes.setdefault(run.node_of[rank] or f"the node of rank {rank}", []).append(i)
    for node, entries in nodes.items():
        worst = entries[0]
        stage, peer = int(found.stage[worst]), int(found.peer[worst])
        ranks = [int(flat[found.stage[i], found.peer[i]]) for i in entries]
        excess = np.array([one.over[stage, peer] for one in run.window])
        start = peers.began(excess)
        slow = float(np.median(excess[start:]))
        waiting = _data_share(run, stage, peer, start)
        others = run.grid.peers - 1
        against = f"its {others} peers" if others else "its own past"
        cause = "data_loading" if waiting > 0.5 else ("own_past" if not others else "slow_worker")
        why = ", because its data comes late" if cause == "data_loading" else ""
        cost = _cost(run, {(int(found.stage[i]), int(found.peer[i])) for i in entries})
        more = f" (so are ranks {_list(ranks[1:])})" if len(ranks) > 1 else ""
        yield _Condition(
            key=f"node:{node}",
            kind=FindingKind.STRAGGLER,
            what=f"is slowed down by rank {ranks[0]} on {node}{more}: it needs {slow:.0%} longer than {against}{why},"
            f" which costs {cost:.1%} of each step",
            since=run.window[start].step,
            evidence={
                "cause": cause,
                "slowdown": f"{slow:.4f}",
                "cost_share_of_step": f"{cost:.4f}",
                "score": f"{found.adjusted[worst]:.4f}",
                "bar": f"{found.bar[worst]:.4f}",
                "ranks": _list(ranks),
                "stage": str(stage),
                "peers": str(others),
                "measured": "work" if not math.isnan(run.window[-1].last_wait_s) else "data wait only",
            },
            node="" if node.startswith("the node of") else node,
            rank=ranks[0],
            members=frozenset(ranks),
        )


def _data_share(run: _Run, stage: int, peer: int, start: int) -> float:
    """How much of the excess is time waited for data."""
    shares = []
    for one in list(run.window)[start:]:
        late = one.data[stage, peer] - np.median(one.data[stage])
        excess = one.work[stage, peer] * one.over[stage, peer] / (1.0 + one.over[stage, peer])
        shares.append(float(late / excess) if excess > 0 else 0.0)
    return float(np.median(shares))


def _cost(run: _Run, slow: set[tuple[int, int]]) -> float:
    """The share of a step that the job would gain if these ranks worked as the slowest of the others of their stage."""
    shares = []
    rows, columns = (list(index) for index in zip(*sorted(slow), strict=True))
    for one in run.window:
        without = one.work.copy()
        without[rows, columns] = 0.0
        excess = one.over[rows, columns]
        alone = run.grid.peers == len(rows) or run.grid.peers == 1
        normal = one.work[rows, columns] / (1.0 + excess) if alone else without[rows].max(axis=1)
        shares.append(max(0.0, float((one.work[rows, columns] - normal).max())) / one.duration_s)
    return float(np.median(shares))


def _loaded(run: _Run, found: Outliers, over: Floats, limits: StragglerThresholds) -> Iterator[_Condition]:
    """Ranks that are slow as their data explains: always the same ones, or others in every step."""
    flat = run.grid.ranks.reshape(run.grid.stages, -1)
    ranks = [int(flat[found.stage[i], found.peer[i]]) for i in np.nonzero(found.is_loaded)[0].tolist()]
    uneven = float(over.max(axis=2).mean())
    if not ranks and (uneven < limits.imbalance or found.explained < 0.5):
        return
    who = (
        f"ranks {_list(ranks)} get more of it than the others" if ranks else "in every step other ranks get more of it"
    )
    yield _Condition(
        key="data",
        kind=FindingKind.IMBALANCE,
        what=f"loses time to uneven data: {who}; the slowest rank of a stage works {uneven:.0%} longer than its peers",
        since=run.window[0].step,
        evidence={
            "cause": "data",
            "slowest_over_median": f"{uneven:.4f}",
            "explained_by_data": f"{found.explained:.4f}",
            "ranks": _list(ranks),
        },
    )


def _long_stage(run: _Run, limits: StragglerThresholds) -> Iterator[_Condition]:
    if run.grid.stages < 2 or math.isnan(run.window[-1].last_wait_s):
        return
    seconds = np.median(np.stack([one.stage_s for one in run.window]), axis=0)
    longest = int(np.argmax(seconds))
    over = float(seconds[longest] / np.mean(np.delete(seconds, longest)) - 1.0)
    if over < limits.imbalance:
        return
    yield _Condition(
        key="stage",
        kind=FindingKind.IMBALANCE,
        what=f"has an uneven pipeline: stage {longest} works {over:.0%} longer than the others",
        since=run.window[0].step,
        evidence={"cause": "stage", "stage": str(longest), "seconds": " ".join(f"{s:.4f}" for s in seconds[:64])},
    )


def _slow_collective(run: _Run, limits: StragglerThresholds) -> Iterator[_Condition]:
    """The rank that is waited for waits for nobody: what it still waits is the communication itself."""
    waits = np.array([one.last_wait_s for one in run.window])
    if np.isnan(waits).any():
        return
    if len(run.usual_wait_s) < limits.window:
        run.usual_wait_s.append(float(waits[-1]))
        return
    usual, noise = float(np.median(run.usual_wait_s)), float(np.std(run.usual_wait_s))
    grown, duration_s = float(np.median(waits)) - usual, float(np.median([one.duration_s for one in run.window]))
    if grown < max(limits.collective * duration_s, limits.z * noise / math.sqrt(len(waits))):
        return
    yield _Condition(
        key="collective",
        kind=FindingKind.SLOW_COLLECTIVE,
        what=f"waits {grown:.3f} s longer for communication in each step than it used to ({usual:.3f} s), on every rank",
        since=run.window[peers.began(waits)].step,
        evidence={"cause": "collective", "usual_s": f"{usual:.4f}", "now_s": f"{usual + grown:.4f}"},
        confidence=0.7,
    )


def _finding(record: StepRecord, condition: _Condition, times: int, now: float) -> Finding:
    flapping = f" It comes and goes: {times} times so far." if times > 1 else ""
    return Finding(
        id=f"steps:{record.job}:{record.generation}:{condition.key}" + (f":{times}" if times > 1 else ""),
        kind=condition.kind,
        severity=Severity.WARNING,
        at=now,
        since=min(record.started_at, now),
        summary=f"{record.job} {condition.what}, since step {condition.since}.{flapping}",
        node=condition.node,
        job=record.job,
        generation=record.generation,
        rank=condition.rank,
        confidence=condition.confidence,
        evidence={**condition.evidence, "since_step": str(condition.since), "times": str(times)},
        ladder=(Remedy.WATCH, Remedy.REPLACE_NODE) if condition.kind is FindingKind.STRAGGLER else (Remedy.WATCH,),
    )


def _list(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:_RANKS_IN_EVIDENCE_MAX])) + (" …" if len(ranks) > _RANKS_IN_EVIDENCE_MAX else "")
