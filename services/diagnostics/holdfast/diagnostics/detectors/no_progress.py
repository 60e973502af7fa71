"""Detects missing progress of a script that reports no steps: its ranks run, but begin no optimizer step for a long time.

Agents count the optimizer steps of such a script (`holdfast.train.observing.observed_steps`) and report the counts at every
tick. A hang looks like this, but so does an evaluation, an export or a download, which the script does not announce. The
finding is therefore a warning with the known facts; the job continues, and its policy decides.

The allowance is `least_s`, or `factor` times the longest pause of this run that ended by itself if that is longer. A generation
that begins no step at all is reported, too, if an earlier one of the run did: otherwise the script may have no optimizer of
torch. Its allowance counts the starts of this run as pauses. Nothing is reported while a node of the generation is silent, or
about a job that reports its own steps, which the `hang` detector judges.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

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
    start_s: float = 0.0  # longest time until the first step of a generation
    observable: bool = False  # an optimizer step was observed, in this generation or an earlier one
    observed: int = 0  # in this generation, by the rank with the most
    nodes: Bounded[str, _Node] = field(default_factory=lambda: Bounded(_NODES_MAX))


@dataclass(slots=True)
class ProgressState:
    jobs: Bounded[str, _Job] = field(default_factory=lambda: Bounded(_JOBS_MAX))
    stopped: Lasting[str] = field(default_factory=Lasting)
    looked_at: float = 0.0


@dataclass(frozen=True, slots=True)
class NoProgress:
    reads: ClassVar = (RankProgress, ClockTick, TelemetryGap, RunStarted)
    initial = ProgressState
    least_s: float = 300.0
    factor: float = 3.0
    silent_s: float = 5.0  # a node that has not reported for longer may have begun a step
    look_s: float = 1.0  # interval between checks of all jobs

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
        job, furthest = state.jobs.get(item.job), max(item.observed, default=0)
        if job is not None and item.generation < job.generation:
            return ()
        if max(item.step, default=0) > 0:  # the script reports its own steps
            return _forget(state, item.job, now) if job is not None else ()
        found: Findings = ()
        if job is None or item.generation > job.generation:
            known = job or _Job(item.generation, now)
            job = state.jobs[item.job] = _Job(item.generation, now, known.longest_s, known.start_s, known.observable)
            found = tuple(state.stopped.over(item.job, now))
        node = job.nodes.get(item.node)
        before = node.observed if node is not None else 0
        if furthest == 0 < before:
            return found + _forget(state, item.job, now)  # it reports its own steps from now on
        if furthest > before:
            if job.observed:
                job.longest_s = max(job.longest_s, now - job.grew_at)
            else:
                job.start_s = max(job.start_s, now - job.grew_at)
            job.grew_at, job.observable = now, True
            found += tuple(state.stopped.over(item.job, now))
        job.observed = max(job.observed, furthest)
        job.nodes[item.node] = _Node(now, furthest, item.process_state)
        return found

    def _look(self, state: ProgressState, now: float, roster: Roster) -> Findings:
        found: Findings = ()
        for name, job in list(state.jobs.items()):
            if not job.observable:
                continue
            generation = roster.current(name, job.generation)
            if generation is None or generation.over or generation.left:
                found += tuple(state.stopped.over(name, now))  # what was learned is for the next generation
                continue
            known_s = job.longest_s if job.observed else max(job.longest_s, job.start_s)
            pause_s, allowance_s = now - job.grew_at, max(self.least_s, self.factor * known_s)
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
    pause_s, longest_s = now - job.grew_at, job.longest_s if job.observed else job.start_s
    where = f"after {job.observed} steps" if job.observed else f"since generation {job.generation} started"
    states = Counter(state or "gone" for node in job.nodes.values() for state in node.states)
    kind = "pause" if job.observed else "start"
    return Finding(
        id=f"no_progress:{name}:{job.generation}:{job.observed}",
        kind=FindingKind.NO_PROGRESS,
        severity=Severity.WARNING,
        at=now,
        since=job.grew_at,
        summary=f"No rank of {name} has begun an optimizer step for {pause_s:.0f} s, {where}; the longest "
        f"{kind} before took {longest_s:.0f} s. The script reports no steps, so this is a hang or a long pause.",
        job=name,
        generation=job.generation,
        confidence=0.5,
        evidence={
            "observed_steps": str(job.observed),
            "pause_s": f"{pause_s:.0f}",
            "allowance_s": f"{allowance_s:.0f}",
            "longest_pause_s": f"{job.longest_s:.1f}",
            "process_states": ", ".join(f"{state} {count}" for state, count in sorted(states.items())),
        },
        recommended_actions=(Remedy.WATCH,),
    )
