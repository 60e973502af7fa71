"""Hangs: no rank of a generation makes progress for longer than its own history explains.

Theory of operation, per (job, generation). *Progress* is any rank finishing a step; *activity* is progress or a change of
phase. The allowance since the last activity is

* `init_s` while any rank is in another phase than `step`, or before the rhythm of the job is known (its first steps, also the
  first of a generation): compiling, restoring, evaluating and saving may take long;
* `max(floor_s, factor × p99 of the last 200 steps)` otherwise, and also when a process stays stopped (state T): no phase of
  training looks like that.

* `init_s` as well while collectives are still entered: a long step is no hang.

A script that never speaks (an unmodified one, without `holdfast.train`) has no progress that could stop: of it only a stopped
process is concluded. A rank that has ended cleanly is no longer waited for.

Half-way through `floor_s` a *baseline* of every rank's CPU time is kept, so that the verdict can tell who worked since. A
verdict looks at what the agents report of ranks that stand still (`Standstill`), and waits `evidence_s` for it beyond the
allowance unless a process is gone or stopped. It needs fresh reports of every node of the generation: a node that is not heard
is a matter of `liveness`, and a diagnostics process that was itself asleep concludes nothing. One finding per stall; progress
ends the stall.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from holdfast.diagnostics.detectors.localise import GONE
from holdfast.diagnostics.detectors.protocol import Blind, JobBegan, Observed
from holdfast.diagnostics.detectors.stall import Evidence, Rule, Stall, report
from holdfast.domain.collectives import Standstill
from holdfast.domain.findings import Finding, FindingKind, StepRecord
from holdfast.domain.job import HangSpec
from holdfast.domain.signals import (
    ClockTick,
    GenerationStarted,
    GenerationStopped,
    NodeDisconnected,
    Phase,
    RankProgress,
    WorkerExited,
)

_GENERATIONS_MAX = 4096
_HISTORY = 200  # steps
_HISTORY_MIN = 3  # fewer say nothing of the rhythm: the first steps of a job initialise and compile
_REPORTS_LAG_S = 2.0  # steps that finished before a crash may be reported this much after it
_EXPLAINS = frozenset(
    {
        FindingKind.WORKER_CRASH,
        FindingKind.WORKER_EXCEPTION,
        FindingKind.REPEATED_EXCEPTION,
        FindingKind.NODE_LOST,
    }
)

Key = tuple[str, int]  # (job, generation)


@dataclass(slots=True)
class _Generation:
    hang: HangSpec
    active_at: float  # diagnostics' clock: last progress or change of phase
    latest: dict[str, RankProgress] = field(default_factory=dict)  # by node
    heard_at: dict[str, float] = field(default_factory=dict)  # by node, diagnostics' clock
    stopped_at: dict[str, float] = field(default_factory=dict)  # nodes with a process in state T, since when seen
    started_at: dict[str, float] = field(default_factory=dict)  # by node, agent's clock
    ended: set[int] = field(default_factory=set)  # ranks that exited with code 0
    spoken: bool = False  # some rank has said something of itself
    stepped: bool = False
    standing: dict[str, Standstill] = field(default_factory=dict)  # by node, of this stall
    moved_at: float = float("-inf")  # diagnostics' clock: some rank was seen to enter another collective
    phase_changed: bool = True  # since the last step
    last_end: float = 0.0
    intervals_s: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    stall: Stall | None = None
    settled: bool = False  # this stall is reported, or another finding explains it
    explained_at: float = float("-inf")  # when another finding explained it
    hung: bool = False  # the step in progress
    over: bool = False  # stopped on purpose; kept for its rhythm until the next one begins


@dataclass(slots=True)
class HangState:
    generations: OrderedDict[Key, _Generation] = field(default_factory=OrderedDict)
    newest: dict[str, int] = field(default_factory=dict)  # job → generation
    stopped: OrderedDict[str, int] = field(default_factory=OrderedDict)  # job → newest generation stopped on purpose


@dataclass(frozen=True, slots=True)
class Hang:
    fresh_s: float = 3.0  # a node not heard for longer is not judged
    evidence_s: float = (
        1.5  # how long a verdict waits for recorders and stacks: one tick and an answer that takes its time
    )

    @property
    def reads(self) -> tuple[type[Observed], ...]:
        return (
            RankProgress,
            Standstill,
            ClockTick,
            StepRecord,
            GenerationStarted,
            GenerationStopped,
            NodeDisconnected,
            WorkerExited,
            Finding,
            Blind,
            JobBegan,
        )

    def initial(self) -> HangState:
        return HangState()

    def observe(self, state: HangState, item: Observed, now: float) -> tuple[HangState, tuple[Finding, ...]]:
        match item:
            case RankProgress():
                _progress(state, item, now)
            case Standstill():
                known = state.generations.get((item.job, item.generation))
                if known is not None:
                    known.standing[item.node] = item
            case ClockTick():
                return state, self._conclude(state, now)
            case StepRecord():
                _stepped(state, item, now)
            case GenerationStarted():
                generation = _open(state, item.job, item.generation, now)
                if generation is not None:
                    generation.hang = item.hang
                    generation.started_at[item.node] = item.at
            case GenerationStopped():
                _close(state, item)
            case NodeDisconnected(clean=True):
                for generation in state.generations.values():
                    _leave(generation, item.node)
            case WorkerExited(exit_code=0, signal=None):
                _ended(state, item)
            case Finding() if item.kind in _EXPLAINS:
                known = state.generations.get((item.job, item.generation))
                if known is not None:
                    known.settled, known.explained_at = True, now
            case JobBegan():
                state.stopped.pop(item.job, None)
                state.generations.pop((item.job, state.newest.pop(item.job, -1)), None)
            case Blind():
                for generation in state.generations.values():
                    generation.active_at, generation.stall = now, None
            case _:
                pass
        return state, ()

    def _conclude(self, state: HangState, now: float) -> tuple[Finding, ...]:
        findings = []
        for key, generation in state.generations.items():
            still_s = now - generation.active_at
            if generation.over or generation.settled or not generation.latest or still_s < generation.hang.floor_s / 2:
                continue
            stall = generation.stall = generation.stall or _stall(generation, now)
            allowance_s, rule = _allowance(generation, stall, now)
            if stall.done or still_s < allowance_s or self._unheard(generation, now):
                continue
            if still_s < allowance_s + self.evidence_s and _lacks_evidence(generation):
                continue
            generation.settled = generation.hung = True
            findings.append(report(key, _evidence(generation, stall), Rule(rule, still_s, allowance_s), now))
        return tuple(findings)

    def _unheard(self, generation: _Generation, now: float) -> bool:
        return any(now - generation.heard_at[node] > self.fresh_s for node in generation.latest)


def _open(state: HangState, job: str, number: int, now: float) -> _Generation | None:
    """The generation, made when it is new; None for one that is over. A newer one ends the older."""
    generation = state.generations.get((job, number))
    if generation is not None:
        return None if generation.over else generation
    if number <= state.stopped.get(job, -1) or number < state.newest.get(job, -1):
        return None
    generation = _Generation(hang=HangSpec(), active_at=now)
    if (older := state.generations.pop((job, state.newest.get(job, -1)), None)) is not None:
        generation.intervals_s.extend(older.intervals_s)  # the rhythm of a job outlives its generations
    state.newest[job] = number
    state.generations[(job, number)] = generation
    while len(state.generations) > _GENERATIONS_MAX:
        (old_job, _), _ = state.generations.popitem(last=False)
        del state.newest[old_job]
    return generation


def _close(state: HangState, item: GenerationStopped) -> None:
    """One node has stopped it on purpose, so the whole of it is ending: silence from here on is no hang."""
    if item.finished:
        return  # the others may still hang on their way out
    state.stopped[item.job] = max(item.generation, state.stopped.get(item.job, -1))
    state.stopped.move_to_end(item.job)
    while len(state.stopped) > _GENERATIONS_MAX:
        state.stopped.popitem(last=False)
    if state.newest.get(item.job, item.generation + 1) <= item.generation:
        state.generations[(item.job, state.newest[item.job])].over = True


def _progress(state: HangState, item: RankProgress, now: float) -> None:
    """The hot path: every node, every tick. Comparing two tuples costs less than looking into them."""
    generation = _open(state, item.job, item.generation, now)
    if generation is None:
        return
    before = generation.latest.get(item.node)
    generation.latest[item.node] = item
    generation.heard_at[item.node] = now
    if "T" in item.process_state or "t" in item.process_state:
        generation.stopped_at.setdefault(item.node, now)
    elif generation.stopped_at:
        generation.stopped_at.pop(item.node, None)
    generation.spoken = generation.spoken or _speaks(generation, before, item)
    if before is None:
        _active(generation, now)
    elif before.rank == item.rank:  # a rank that disappears from the columns has not made progress
        if before.phase != item.phase:
            _active(generation, now)
            generation.phase_changed = True
        if before.collective_seq != item.collective_seq and _entered_more(before, item):
            generation.moved_at = now
        if before.step != item.step:
            _active(generation, now)
            if now - generation.explained_at > _REPORTS_LAG_S:
                generation.settled = False  # it goes on after all: the next stall is a new one


def _entered_more(before: RankProgress, item: RankProgress) -> bool:
    return any(new > old >= 0 for old, new in zip(before.collective_seq, item.collective_seq, strict=True))


def _lacks_evidence(generation: _Generation) -> bool:
    """Whether recorders could still say more than the processes have said."""
    asked = any(count >= 0 for item in generation.latest.values() for count in item.collective_seq)
    if not asked or generation.stopped_at or any(GONE & set(item.process_state) for item in generation.latest.values()):
        return False
    return not generation.standing.keys() >= generation.latest.keys()


def _speaks(generation: _Generation, before: RankProgress | None, item: RankProgress) -> bool:
    """Whether a rank has said anything: agents put a silent one in phase `init` since the moment that they started it."""
    if any(phase is not Phase.INIT for phase in item.phase):
        return True
    if before is not None and (before.step, before.phase_at) != (item.step, item.phase_at):
        return True
    started_at = generation.started_at.get(item.node)
    return started_at is not None and any(at != started_at for at in item.phase_at)


def _ended(state: HangState, exit_: WorkerExited) -> None:
    generation = state.generations.get((exit_.job, exit_.generation))
    if generation is None:
        return
    generation.ended.add(exit_.rank)
    latest = generation.latest.get(exit_.node)
    if latest is not None and generation.ended.issuperset(latest.rank):
        _leave(generation, exit_.node)  # its agent has nothing more to report


def _leave(generation: _Generation, node: str) -> None:
    generation.latest.pop(node, None)
    generation.standing.pop(node, None)
    generation.stopped_at.pop(node, None)


def _active(generation: _Generation, now: float) -> None:
    generation.active_at, generation.stall = now, None
    generation.standing.clear()


def _stepped(state: HangState, record: StepRecord, now: float) -> None:
    generation = state.generations.get((record.job, record.generation))
    if generation is None:
        return
    _active(generation, now)
    generation.stepped = True
    took_s = record.ended_at - record.started_at + record.stall_s
    # Between two steps without a change of phase, what the script does outside of `run.step` belongs to the rhythm.
    if generation.last_end and not generation.phase_changed:
        took_s = max(took_s, record.ended_at - generation.last_end)
    if not generation.hung:  # a step that hung is no part of the rhythm, or the next hang would be excused by it
        generation.intervals_s.append(took_s)
    generation.hung = False
    generation.last_end, generation.phase_changed = record.ended_at, False


def _stall(generation: _Generation, now: float) -> Stall:
    phases = {phase for progress in generation.latest.values() for phase in progress.phase}
    return Stall(
        began=generation.active_at,
        baseline_at=now,
        baseline=dict(generation.latest),
        only_stepping=phases <= {Phase.STEP},
        done=bool(phases) and phases <= {Phase.DONE},
    )


def _allowance(generation: _Generation, stall: Stall, now: float) -> tuple[float, str]:
    """How long the generation may be still, seconds, and by which rule."""
    hang = generation.hang
    # A debugger or a profiler stops a process for an instant; only one that stays stopped is evidence.
    stopped = any(now - since >= hang.floor_s for since in generation.stopped_at.values())
    if not stopped:
        if not generation.spoken:
            return math.inf, "never: the script says nothing of its progress"
        if not generation.stepped or len(generation.intervals_s) < _HISTORY_MIN:
            return hang.init_s, "init_s: too few steps finished to know the rhythm"
        if not stall.only_stepping:
            return hang.init_s, "init_s: a rank is in another phase than step"
        if now - generation.moved_at < hang.floor_s:
            return hang.init_s, "init_s: collectives are still entered"
    slow_s = p99(generation.intervals_s)
    if hang.factor * slow_s > hang.floor_s:
        return hang.factor * slow_s, f"{hang.factor:g} × p99 step time of {slow_s:.2f} s"
    return hang.floor_s, "floor_s"


def p99(values: deque[float]) -> float:
    """The 99th percentile (nearest rank); 0.0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else 0.0


def _evidence(generation: _Generation, stall: Stall) -> Evidence:
    return Evidence(stall, generation.latest, generation.standing, frozenset(generation.ended))
