"""The facts about a generation's ranks that the hang detector needs: a fold over signals, without conclusions. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.localise import GONE
from holdfast.diagnostics.detectors.rhythm import Rhythm
from holdfast.diagnostics.detectors.stall import Evidence, Look, Stall
from holdfast.diagnostics.roster import Generation, Roster
from holdfast.domain.collectives import StallSnapshot
from holdfast.domain.findings import Finding, FindingKind, Severity, StepRecord
from holdfast.domain.job import HangSpec
from holdfast.domain.signals import GenerationStarted, Phase, RankProgress, WorkerExited

_JOBS_MAX = 4096
LONG_PHASES = frozenset({Phase.EVAL, Phase.COMPILE})  # announced by scripts; the library ends its own phases
FIRST_STEPS = 3  # of a generation: these steps initialise and compile
TICK_S = 1.0  # between two reports of an agent
_REPORTS_LAG_S = 2.0  # a step that finished before a crash may be reported up to this long after the crash
_SIGNALLED = frozenset({"T", *GONE})
_EXPLAINS = frozenset({FindingKind.WORKER_CRASH, FindingKind.WORKER_EXCEPTION, FindingKind.REPEATED_EXCEPTION})


@dataclass(slots=True)
class Watched:
    """The newest generation of a job."""

    generation: Generation
    active_at: float  # diagnostics' clock: last progress or change of phase
    latest: dict[str, RankProgress] = field(default_factory=dict)  # by node
    heard_at: dict[str, float] = field(default_factory=dict)  # last report by node, diagnostics' clock
    # Node → time since which one of its processes is in state T, or dead; and since which one is traced by a debugger (t).
    signalled_at: dict[str, float] = field(default_factory=dict)
    traced_at: dict[str, float] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)  # ranks that exited with code 0
    has_reported: bool = False  # some rank has reported a step or a phase by itself
    newest_step: int = -1  # that some rank was seen to finish; -1 = none was seen
    steps: int = 0  # number of steps finished in this generation
    step: int = 0  # the newest step that every rank has finished
    standing: dict[str, StallSnapshot] = field(default_factory=dict)  # by node, of this stall
    moved_at: float = float("-inf")  # diagnostics' clock: when a rank last entered another collective
    phase_changed: bool = True  # since the last step
    last_end: float = 0.0
    rhythm: Rhythm = field(default_factory=Rhythm)
    stall: Stall | None = None
    looked: Look | None = None  # result of the flight recorders; None after they have reported again
    prove_at: float = float("-inf")  # time of the next attempt to prove the stall: it takes long with 100,000 ranks
    warned: bool = False  # a warning about this stall was reported
    computes_until: float = float("-inf")  # the ranks may be computing; not checked again before this time
    settled: bool = False  # this stall is reported as an error, or another finding explains it
    explained_at: float = float("-inf")  # when another finding explained the stall
    lost: set[str] = field(default_factory=set)  # lost nodes
    lost_at: float = float("-inf")

    @property
    def hang(self) -> HangSpec:
        return self.generation.hang

    @property
    def still_since(self) -> float:
        """The beginning of the stall, by diagnostics' clock: the last progress or change of phase. If the script reports
        neither, the first report of a process that is stopped, dead or traced."""
        if self.has_reported:
            return self.active_at
        return min((*self.signalled_at.values(), *self.traced_at.values()), default=self.active_at)


@dataclass(slots=True)
class HangState:
    jobs: Bounded[str, Watched] = field(default_factory=lambda: Bounded(_JOBS_MAX))

    def of(self, item: StallSnapshot | StepRecord | Finding | WorkerExited) -> Watched | None:
        """Return the state of the generation that `item` is about; None if another generation is watched."""
        known = self.jobs.get(item.job)
        return known if known is not None and known.generation.number == item.generation else None


def opened(state: HangState, item: RankProgress | GenerationStarted, now: float, roster: Roster) -> Watched | None:
    """Return the generation of `item`; None if it is over or not the newest. A generation that is over is kept until the next
    generation begins and takes over its rhythm."""
    generation = roster.current(item.job, item.generation)
    if generation is None or generation.over:
        return None
    known = state.jobs.get(item.job)
    if known is None or known.generation is not generation:
        rhythm = Rhythm() if known is None else known.rhythm
        known = state.jobs[item.job] = Watched(generation, active_at=now, rhythm=rhythm)
    return known


def progress(state: HangState, item: RankProgress, now: float, roster: Roster) -> None:
    """Fold progress. Hot path: called for every node at every tick. It compares whole tuples, which costs less than comparing
    rank by rank."""
    generation = opened(state, item, now, roster)
    if generation is None:
        return
    before = generation.latest.get(item.node)
    generation.latest[item.node] = item
    generation.heard_at[item.node] = now
    if not _SIGNALLED.isdisjoint(item.process_state) and _is_signalled(generation, item):
        if _has_run(before, item):
            generation.signalled_at[item.node] = now  # the process has run in between, so it was stopped again
        else:
            generation.signalled_at.setdefault(item.node, now)
    elif generation.signalled_at:
        generation.signalled_at.pop(item.node, None)
    if "t" in item.process_state:
        generation.traced_at.setdefault(item.node, now)
    elif generation.traced_at:
        generation.traced_at.pop(item.node, None)
    generation.has_reported = generation.has_reported or _reports(generation, before, item)
    if before is None:
        # Of a node that comes back, the first report shows no progress if other nodes have shown as much.
        if max(item.step, default=0) > generation.newest_step:
            active(generation, now)
    elif before.rank == item.rank:  # a rank that is missing from the columns has not made progress
        if before.phase != item.phase:
            active(generation, now)
            generation.phase_changed = True
        if before.collective_seq != item.collective_seq and _entered_more(before, item):
            generation.moved_at = now
        if before.step != item.step:
            active(generation, now)
            generation.newest_step = max(generation.newest_step, *item.step)
            if now - generation.explained_at > _REPORTS_LAG_S:
                generation.settled = False  # there is progress after all: the next stall is a new stall


def _is_signalled(generation: Watched, item: RankProgress) -> bool:
    """Whether some process is stopped, or dead without an exit code 0."""
    states = zip(item.rank, item.process_state, strict=True)
    return any(state in _SIGNALLED and (state == "T" or rank not in generation.ended) for rank, state in states)


def stopped(generation: Watched) -> bool:
    """Whether some process is stopped by a POSIX signal."""
    return any("T" in item.process_state for item in generation.latest.values())


def _has_run(before: RankProgress | None, item: RankProgress) -> bool:
    """Whether every stopped process has used CPU time since the last report, as if it is stopped and continued in turn."""
    if before is None or before.rank != item.rank:
        return False
    stopped = [i for i, state in enumerate(item.process_state) if state == "T"]
    return bool(stopped) and all(item.cpu_s[i] > before.cpu_s[i] for i in stopped)


def _entered_more(before: RankProgress, item: RankProgress) -> bool:
    return any(new > old >= 0 for old, new in zip(before.collective_seq, item.collective_seq, strict=True))


def lacks_evidence(generation: Watched) -> bool:
    """Whether flight recorders may still add evidence to that of the process states."""
    counted = any(count >= 0 for item in generation.latest.values() for count in item.collective_seq)
    if not counted or generation.signalled_at or generation.traced_at:
        return False
    return not all_reported(generation)


def all_reported(generation: Watched) -> bool:
    """Whether every node that is not lost has reported its silent ranks. Called at every tick, so names are compared only if
    there are enough reports."""
    if len(generation.standing) < len(generation.latest) - len(generation.lost):
        return False
    return generation.standing.keys() >= judged(generation)


def _reports(generation: Watched, before: RankProgress | None, item: RankProgress) -> bool:
    """Whether a rank has reported by itself. Agents report a silent rank with phase `init` and the time of its start."""
    if any(phase is not Phase.INIT for phase in item.phase):
        return True
    if before is not None and (before.step, before.phase_at) != (item.step, item.phase_at):
        return True
    started_at = generation.generation.starts.get(item.node)
    return started_at is not None and any(at != started_at for at in item.phase_at)


def ended(state: HangState, exit_: WorkerExited) -> None:
    generation = state.of(exit_)
    if generation is None:
        return
    generation.ended.add(exit_.rank)
    latest = generation.latest.get(exit_.node)
    if latest is not None and generation.ended.issuperset(latest.rank):
        leave(generation, exit_.node)  # its agent no longer reports these ranks


def leave(generation: Watched, node: str) -> None:
    generation.latest.pop(node, None)
    generation.standing.pop(node, None)
    generation.signalled_at.pop(node, None)
    generation.traced_at.pop(node, None)


def explained(state: HangState, item: Finding, now: float) -> None:
    """Record that another finding explains why no rank makes progress, or withdraws that explanation."""
    generation = state.of(item)
    if generation is None:
        return
    if item.kind in _EXPLAINS:
        generation.settled, generation.explained_at = True, now
    elif item.kind is FindingKind.NODE_LOST and item.severity is Severity.ERROR:
        generation.lost.add(item.node)
        generation.lost_at = now
    elif item.kind is FindingKind.NODE_LOST and item.severity is Severity.INFO:
        generation.lost.discard(item.node)


def active(generation: Watched, now: float) -> None:
    generation.active_at, generation.stall, generation.looked, generation.warned = now, None, None, False
    generation.computes_until = float("-inf")
    generation.standing.clear()


def stepped(state: HangState, record: StepRecord, now: float) -> None:
    generation = state.of(record)
    if generation is None:
        return
    active(generation, now)
    duration_s = record.ended_at - record.started_at + record.stall_s
    # Without a change of phase between two steps, the time that the script spends outside of `run.step` is part of the rhythm.
    if generation.last_end and not generation.phase_changed:
        duration_s = max(duration_s, record.ended_at - generation.last_end)
    if generation.steps >= FIRST_STEPS:
        generation.rhythm.learn(record.step, duration_s, usual_s(generation))
    generation.steps += 1
    generation.step = record.step
    generation.last_end, generation.phase_changed = record.ended_at, False


def usual_s(generation: Watched) -> float:
    """The time that a step may take by the job's rhythm alone, in seconds."""
    return max(generation.hang.floor_s, generation.hang.factor * generation.rhythm.slow_s)


def stalled(generation: Watched, now: float) -> Stall:
    phases = {phase for progress in generation.latest.values() for phase in progress.phase}
    return Stall(
        began=generation.active_at,
        baseline_at=now,
        baseline=dict(generation.latest),
        only_stepping=phases <= {Phase.STEP},
        announced=not phases.isdisjoint(LONG_PHASES),
        done=bool(phases) and phases <= {Phase.DONE},
    )


def judged(generation: Watched) -> set[str]:
    """The nodes whose reports a diagnosis needs: all nodes that are not lost."""
    return generation.latest.keys() - generation.lost


def still_by_agents(generation: Watched, now: float) -> float:
    """Seconds without any change of phase, by the agents' clocks, up to the newest report of each agent. A report arrives after
    one tick at most; this bound limits the effect of a clock that jumped."""
    if not generation.has_reported:
        return 0.0
    reports = (generation.latest[node] for node in judged(generation))
    still_s = min((item.at - max(item.phase_at) for item in reports if item.phase_at), default=0.0)
    return min(still_s, now - generation.active_at + TICK_S)


def evidence_of(generation: Watched, stall: Stall) -> Evidence:
    latest = {node: item for node, item in generation.latest.items() if node not in generation.lost}
    return Evidence(
        stall,
        generation.still_since,
        generation.has_reported,
        latest,
        generation.standing,
        frozenset(generation.ended),
        max(generation.generation.world_size, len(generation.generation.node_of)) - len(generation.ended),
        generation.has_reported and generation.steps == 0,
    )
