"""Detects missing progress of a script that reports no steps: its ranks run, but begin no optimizer step for a long time.

Agents count the optimizer steps of such a script (`holdfast.train.observed_steps`) and report the counts at every tick. A hang
looks like this, but so does an evaluation, an export or a download, which the script does not announce. The finding is
therefore a warning with the known facts; the job continues, and its policy decides.

The allowance is `least_s`, or `factor` times the longest pause of this run that ended by itself if that is longer. Nothing is
reported while a node of the generation is silent, about a generation without an observed step, or about a job that reports its
own steps, which the `hang` detector judges.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.lasting import Lasting
from holdfast.diagnostics.detectors.protocol import Findings, Observed, TelemetryGap
from holdfast.diagnostics.roster import Roster, RunStarted
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity
from holdfast.domain.signals import ClockTick, RankProgress

_JOBS_MAX = 4096
_NODES_MAX = 50_000  # of one job


@dataclass(slots=True)
class _Node:
    reported_at: float  # diagnostics' clock, like all times here
    observed: int  # of the rank with the most observed steps
    states: tuple[str, ...]  # of its processes


@dataclass(slots=True)
class _Job:
    generation: int
    grew_at: float
    longest_s: float = 0.0  # longest pause that has ended, also in earlier generations
    nodes: Bounded[str, _Node] = field(default_factory=lambda: Bounded(_NODES_MAX))


@dataclass(slots=True)
class ProgressState:
    jobs: Bounded[str, _Job] = field(default_factory=lambda: Bounded(_JOBS_MAX))
    stopped: Lasting[str] = field(default_factory=Lasting)
    looked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class NoProgress:
    least_s: float = 300.0
    factor: float = 3.0
    silent_s: float = 5.0  # a node that has not reported for longer may have begun a step
    look_s: float = 1.0  # interval between checks of all jobs

    @property
    def reads(self) -> tuple[type[Observed], ...]:
        return (RankProgress, ClockTick, TelemetryGap, RunStarted)

    def initial(self) -> ProgressState:
        return ProgressState()

    def observe(
        self, state: ProgressState, item: Observed, now: float, roster: Roster
    ) -> tuple[ProgressState, Findings]:
        match item:
            case RankProgress():
                return state, self._progress(state, item, now)
            case ClockTick() if not 0.0 <= now - state.looked_at < self.look_s:
                state.looked_at = now
                return state, self._look(state, now, roster)
            case TelemetryGap():
                for job in state.jobs.values():
                    job.grew_at = now
            case RunStarted():
                return state, _forget(state, item.job, now)
            case _:
                pass
        return state, ()

    def _progress(self, state: ProgressState, item: RankProgress, now: float) -> Findings:
        job = state.jobs.get(item.job)
        if not item.observed or max(item.observed) == 0:
            # No step was observed yet, or the script has reported a step itself.
            own = job is not None and item.generation == job.generation and item.node in job.nodes
            return _forget(state, item.job, now) if own else ()
        if job is None or item.generation > job.generation:
            longest_s = job.longest_s if job is not None else 0.0
            job = state.jobs[item.job] = _Job(item.generation, now, longest_s)
            found = tuple(state.stopped.over(item.job, now))
        elif item.generation < job.generation:
            return ()
        else:
            found = ()
        node, furthest = job.nodes.get(item.node), max(item.observed)
        if node is None or furthest > node.observed:
            job.longest_s = max(job.longest_s, now - job.grew_at)
            job.grew_at = now
            found += tuple(state.stopped.over(item.job, now))
        job.nodes[item.node] = _Node(now, furthest, item.process_state)
        return found

    def _look(self, state: ProgressState, now: float, roster: Roster) -> Findings:
        found: Findings = ()
        for name, job in list(state.jobs.items()):
            generation = roster.current(name, job.generation)
            if generation is None or generation.over or generation.left:
                found += _forget(state, name, now)
                continue
            pause_s, allowance_s = now - job.grew_at, max(self.least_s, self.factor * job.longest_s)
            if pause_s <= allowance_s or generation.nodes - job.nodes.keys():
                continue
            if any(now - node.reported_at > self.silent_s for node in job.nodes.values()):
                continue
            found += tuple(state.stopped.seen(name, now, partial(_stopped, name, job, allowance_s, now)))
        return found


def _forget(state: ProgressState, name: str, now: float) -> Findings:
    state.jobs.pop(name, None)
    return tuple(state.stopped.over(name, now))


def _stopped(name: str, job: _Job, allowance_s: float, now: float) -> Finding:
    furthest = max(node.observed for node in job.nodes.values())
    pause_s = now - job.grew_at
    states = Counter(state or "gone" for node in job.nodes.values() for state in node.states)
    return Finding(
        id=f"no_progress:{name}:{job.generation}:{furthest}",
        kind=FindingKind.NO_PROGRESS,
        severity=Severity.WARNING,
        at=now,
        since=job.grew_at,
        summary=f"No rank of {name} has begun an optimizer step for {pause_s:.0f} s, after {furthest} steps; the longest "
        f"earlier pause took {job.longest_s:.0f} s. The script reports no steps, so this is a hang or a long pause.",
        job=name,
        generation=job.generation,
        confidence=0.5,
        evidence={
            "observed_steps": str(furthest),
            "pause_s": f"{pause_s:.0f}",
            "allowance_s": f"{allowance_s:.0f}",
            "longest_pause_s": f"{job.longest_s:.1f}",
            "process_states": ", ".join(f"{state} {count}" for state, count in sorted(states.items())),
        },
        ladder=(Remedy.WATCH,),
    )
