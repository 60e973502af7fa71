"""Unexpected exits: which rank failed first, and how.

Theory of operation, per (job, generation). The first exit that is a failure of its own (a signal, a code, the script's own
exception) is a finding at once; there is no waiting window. An exit by a collective error is held for `hold_s`: nearly
always its root is on the way (another rank's exit, a lost node). If nothing comes it is reported after all, with low
confidence, saying that no root was seen; unless a rank had ended with code 0 before: then the others have waited for one
that had left, and it is named. Exits that follow a root are cascade and say nothing new.

Signals of several nodes are not ordered. When one arrives late that is a better root (earlier on its node's clock by more
than the clocks may differ, or an own failure against a collective error) the finding is corrected: a new one with
`supersedes=<id>` in its evidence.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.diagnostics.detectors import repeated_exception
from holdfast.diagnostics.detectors.blame import Blame, Context, Who, blame
from holdfast.diagnostics.detectors.exit_cause import Cause, cause_of, ending, failed_at, is_clean, is_failure
from holdfast.diagnostics.detectors.protocol import JobBegan, Observed
from holdfast.domain.findings import Finding, FindingKind, Remedy, Severity, StepRecord
from holdfast.domain.signals import ClockTick, GenerationStarted, GenerationStopped, WorkerExited

_GENERATIONS_MAX = 4096  # remembered, over all jobs; the oldest is forgotten first
_JOBS_MAX = 4096
_KEPT_MAX = 4096  # nodes, or jobs
_FRAMES_MAX = 12  # innermost, in the evidence
_LOG_LINES_MAX = 10

Key = tuple[str, int]  # (job, generation)


@dataclass(slots=True)
class _Generation:
    """What is known of the exits of one generation."""

    started_at: float | None = None  # agent's clock, earliest
    stopped: set[str] = field(default_factory=set)  # nodes that stopped it on purpose
    exited: set[int] = field(default_factory=set)  # ranks: a signal that is sent again says nothing new
    left: WorkerExited | None = None  # the first that ended with code 0, by its own clock
    root: WorkerExited | None = None
    root_cause: Cause = Cause.COLLECTIVE
    root_id: str = ""
    root_found_at: float = 0.0
    held: list[WorkerExited] = field(default_factory=list)
    hold_until: float = 0.0
    node_lost: bool = False  # explains every later exit of this generation


@dataclass(slots=True)
class ExitState:
    generations: OrderedDict[Key, _Generation] = field(default_factory=OrderedDict)
    # By job, by fingerprint.
    failures: OrderedDict[str, dict[str, repeated_exception.Failure]] = field(default_factory=OrderedDict)
    began: OrderedDict[str, float] = field(default_factory=OrderedDict)  # by job: agent's clock, its first generation
    holding: set[Key] = field(default_factory=set)
    hardware: OrderedDict[str, Finding] = field(default_factory=OrderedDict)  # by node: its newest hardware finding
    out_of_memory: OrderedDict[str, float] = field(default_factory=OrderedDict)  # by node: diagnostics' clock
    places: OrderedDict[str, dict[str, float]] = field(default_factory=OrderedDict)  # by job: where it failed, when
    guests: OrderedDict[str, set[str]] = field(default_factory=OrderedDict)  # by node: jobs that failed there


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """WORKER_CRASH, WORKER_EXCEPTION and, in place of the latter, REPEATED_EXCEPTION."""

    hold_s: float = 0.3  # how long a collective error waits for its root
    skew_s: float = 0.1  # clocks of two nodes may differ by this much
    correct_within_s: float = 10.0  # later corrections would come after the recovery
    near_s: float = 60.0  # a hardware finding explains failures of its node within this
    memory_s: float = 86_400.0  # failures of other jobs on a node count for this long
    early_s: float = 300.0  # after the start of a generation: "before the first step" means something only here

    @property
    def reads(self) -> tuple[type[Observed], ...]:
        return (WorkerExited, GenerationStarted, GenerationStopped, StepRecord, Finding, ClockTick, JobBegan)

    def initial(self) -> ExitState:
        return ExitState()

    def observe(self, state: ExitState, item: Observed, now: float) -> tuple[ExitState, tuple[Finding, ...]]:
        match item:
            case ClockTick():
                return state, self._expire(state, now) if state.holding else ()
            case WorkerExited():
                return state, self._exited(state, item, now)
            case StepRecord():
                if known := state.failures.get(item.job):
                    state.failures[item.job] = repeated_exception.got_past(known, item.step)
            case GenerationStarted():
                generation = _generation(state, item.job, item.generation)
                _keep(state.began, item.job, min(item.at, state.began.get(item.job, item.at)))
                generation.started_at = min(item.at, generation.started_at or item.at)
            case GenerationStopped():
                _generation(state, item.job, item.generation).stopped.add(item.node)
            case JobBegan():
                state.failures.pop(item.job, None)
                state.began.pop(item.job, None)
                for key in [key for key in state.generations if key[0] == item.job]:
                    del state.generations[key]
                    state.holding.discard(key)
            case Finding(kind=FindingKind.NODE_LOST) if item.job:
                generation = _generation(state, item.job, item.generation)
                generation.node_lost = True
                generation.held.clear()
                state.holding.discard((item.job, item.generation))
            case Finding(kind=FindingKind.GPU_ERROR) if item.severity in (Severity.ERROR, Severity.FATAL):
                _keep(state.hardware, item.node, item)
            case Finding(kind=FindingKind.HOST_OOM):
                _keep(state.out_of_memory, item.node, now)
            case _:
                pass
        return state, ()

    def _exited(self, state: ExitState, exit_: WorkerExited, now: float) -> tuple[Finding, ...]:
        key = (exit_.job, exit_.generation)
        generation = _generation(state, *key)
        if is_clean(exit_) and (generation.left is None or exit_.at < generation.left.at):
            generation.left = exit_
        if not is_failure(exit_) or exit_.rank in generation.exited or exit_.node in generation.stopped:
            return ()
        generation.exited.add(exit_.rank)
        if generation.node_lost:
            return ()
        cause = cause_of(exit_)
        if generation.root is not None:
            return self._correct(state, generation, exit_, cause, now)
        if cause is Cause.OWN:
            return (self._found(state, generation, exit_, cause, now),)
        if not generation.held:
            generation.hold_until = now + self.hold_s
            state.holding.add(key)
        generation.held.append(exit_)
        return ()

    def _correct(
        self, state: ExitState, generation: _Generation, exit_: WorkerExited, cause: Cause, now: float
    ) -> tuple[Finding, ...]:
        """A late signal that names a better root replaces the finding; everything else is cascade."""
        assert generation.root is not None
        if cause is Cause.COLLECTIVE or now - generation.root_found_at > self.correct_within_s:
            return ()  # an echo is no better than what is known
        earlier_s = failed_at(generation.root) - failed_at(exit_)
        enough_s = -self.skew_s if generation.root_cause is Cause.COLLECTIVE else self.skew_s
        if earlier_s < enough_s:
            return ()
        return (self._found(state, generation, exit_, cause, now, supersedes=generation.root_id),)

    def _expire(self, state: ExitState, now: float) -> tuple[Finding, ...]:
        """Collective errors whose root did not show itself in time. A clock that was set back ends the wait as well."""
        findings: list[Finding] = []
        for key in sorted(state.holding):
            generation = state.generations[key]
            if generation.hold_until - self.hold_s <= now < generation.hold_until:
                continue
            first = min(generation.held, key=lambda exit_: (failed_at(exit_), exit_.rank))
            if (left := generation.left) is not None and left.at <= failed_at(first) + self.skew_s:
                first = left
            findings.append(self._found(state, generation, first, Cause.COLLECTIVE, now))
        return tuple(findings)

    def _found(
        self,
        state: ExitState,
        generation: _Generation,
        exit_: WorkerExited,
        cause: Cause,
        now: float,
        supersedes: str = "",
    ) -> Finding:
        """Make `exit_` the root of its generation and report it."""
        failure = self._recurrence(state, generation, exit_, cause)
        judged = self._blame(state, generation, exit_, failure, now) if cause is Cause.OWN else None
        finding = _report(exit_, cause, failure, judged, echoes=len(generation.held), supersedes=supersedes, now=now)
        generation.root, generation.root_cause = exit_, cause
        generation.root_id, generation.root_found_at = finding.id, now
        generation.held.clear()
        state.holding.discard((exit_.job, exit_.generation))
        return finding

    def _recurrence(
        self, state: ExitState, generation: _Generation, exit_: WorkerExited, cause: Cause
    ) -> repeated_exception.Failure | None:
        """How often this exception or signal has been seen; None where the question has no meaning."""
        fingerprint = repeated_exception.fingerprint_of(exit_)
        if not fingerprint or cause is not Cause.OWN:
            return None
        started_at = generation.started_at
        known = state.failures.get(exit_.job, {})
        failure = repeated_exception.judge(
            known.get(fingerprint),
            fingerprint,
            step=exit_.step,
            generation=exit_.generation,
            early=started_at is not None and exit_.at - started_at <= self.early_s,
            node=exit_.node,
        )
        _keep(state.failures, exit_.job, repeated_exception.remembered(known, failure), _JOBS_MAX)
        return failure

    def _blame(
        self,
        state: ExitState,
        generation: _Generation,
        exit_: WorkerExited,
        failure: repeated_exception.Failure | None,
        now: float,
    ) -> Blame:
        places, guests = state.places.get(exit_.job, {}), state.guests.get(exit_.node, set())
        places[exit_.node] = now
        guests = {job for job in guests if job in state.places} | {exit_.job}
        _keep(state.places, exit_.job, places)
        _keep(state.guests, exit_.node, guests)
        hardware, began = state.hardware.get(exit_.node), state.began.get(exit_.job, exit_.at)
        # What was found before the job first started was known when it got this node: repaired, or not in its way.
        explains = hardware is not None and hardware.at >= began and abs(now - hardware.at) <= self.near_s
        started_at = generation.started_at
        context = Context(
            hardware=hardware.summary if hardware is not None and explains else "",
            host_oom=abs(now - state.out_of_memory.get(exit_.node, -1e12)) <= self.near_s,
            tries=failure.tries if failure is not None else 1,
            nodes=len(failure.nodes) if failure is not None else 1,
            other_jobs=sum(
                _failed_here_only(state, job, exit_.node, now - self.memory_s) for job in guests - {exit_.job}
            ),
            after_s=max(0.0, exit_.at - began),
            before_first_step=exit_.step == 0,
            early=started_at is not None and exit_.at - started_at <= self.early_s,
        )
        return blame(exit_, context)


def _failed_here_only(state: ExitState, job: str, node: str, after: float) -> bool:
    places = state.places.get(job, {})
    return len(places) == 1 and places.get(node, -math.inf) >= after


V = TypeVar("V")


def _keep(table: OrderedDict[str, V], key: str, value: V, most: int = _KEPT_MAX) -> None:
    """Remember under a bound; the entry that was written longest ago goes first."""
    table[key] = value
    table.move_to_end(key)
    while len(table) > most:
        table.popitem(last=False)


def _generation(state: ExitState, job: str, number: int) -> _Generation:
    key = (job, number)
    generation = state.generations.get(key)
    if generation is None:
        generation = state.generations[key] = _Generation()
        while len(state.generations) > _GENERATIONS_MAX:
            oldest, _ = state.generations.popitem(last=False)
            state.holding.discard(oldest)
    return generation


def _report(
    exit_: WorkerExited,
    cause: Cause,
    failure: repeated_exception.Failure | None,
    judged: Blame | None,
    *,
    echoes: int,
    supersedes: str,
    now: float,
) -> Finding:
    evidence = {"pid": str(exit_.pid), "step": str(exit_.step)}
    if exit_.signal is not None:
        evidence["signal"] = str(exit_.signal)
    if exit_.exit_code is not None:
        evidence["exit_code"] = str(exit_.exit_code)
    if exit_.error is not None:
        evidence["exception"] = exit_.error.type
        evidence["message"] = exit_.error.message[:1000]
        evidence["frames"] = "\n".join(exit_.error.frames[-_FRAMES_MAX:])
        evidence["fingerprint"] = repeated_exception.fingerprint(exit_.error)
    if exit_.log_tail:
        evidence["log"] = "\n".join(exit_.log_tail[-_LOG_LINES_MAX:])
    if supersedes:
        evidence["supersedes"] = supersedes
    if judged is not None:
        evidence |= {"blame": judged.who.value, "error_class": judged.error.value, "because": judged.why}
        evidence |= {"after_s": f"{judged.after_s:.0f}", "prior_user": f"{judged.prior_user:.3f}"}
    where = f"Rank {exit_.rank} on {exit_.node}"
    when = f"after step {exit_.step}" if exit_.step > 0 else "before its first step"
    summary = f"{where} {ending(exit_)} {when}."
    kind = FindingKind.WORKER_CRASH if exit_.error is None else FindingKind.WORKER_EXCEPTION
    confidence = 0.95
    ladder: tuple[Remedy, ...] = (Remedy.RESTART_PROCESS, Remedy.REPLACE_NODE)
    if cause is Cause.COLLECTIVE and is_clean(exit_):
        confidence, ladder = 0.8, (Remedy.RESTART_PROCESS,)
        evidence["root"] = "left early"
        evidence["collective_errors"] = str(max(1, echoes))
        summary = f"{where} ended with exit code 0 {when} while others went on, and their communication with it failed."
    elif cause is Cause.COLLECTIVE:
        confidence, ladder = 0.3, (Remedy.RESTART_PROCESS,)
        evidence["root"] = "not seen"
        evidence["collective_errors"] = str(max(1, echoes))
        summary = (
            f"{where} {ending(exit_)} {when}: a communication error, and no rank or node that failed first was seen."
        )
    elif failure is not None and failure.tries > 1 and judged is not None and judged.who is Who.USER:
        kind, ladder = FindingKind.REPEATED_EXCEPTION, (Remedy.STOP_JOB,)
        evidence["tries"] = str(failure.tries)
        evidence["step"] = str(failure.step)
        at = f"after step {failure.step}" if failure.step > 0 else "before the first step"
        summary = f"{where} {ending(exit_)} {at}, for the {_ordinal(failure.tries)} time: a restart does not cure it."
    elif judged is not None and judged.who is Who.HARDWARE:
        ladder = (Remedy.REPLACE_NODE,)
    elif exit_.error is not None:
        ladder = (Remedy.RESTART_PROCESS,)
    return Finding(
        id=f"worker:{exit_.job}:{exit_.generation}:{exit_.rank}:{exit_.at:.3f}",
        kind=kind,
        severity=Severity.ERROR,
        at=now,
        since=min(failed_at(exit_), now),
        summary=summary,
        node=exit_.node,
        job=exit_.job,
        generation=exit_.generation,
        rank=exit_.rank,
        confidence=confidence,
        evidence=evidence,
        ladder=ladder,
        traceparent=exit_.traceparent,
    )


def _ordinal(n: int) -> str:
    suffix = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"
