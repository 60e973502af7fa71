"""Detects unexpected exits: the root failure of a generation, and how that rank failed.

Theory of operation, per (job, generation). The first exit whose cause is the rank itself (a POSIX signal, an exit code, the
script's own exception) is reported at once. An exit by a collective error is held for `hold_s`, because its root (the exit of
another rank, or a lost node) is nearly always reported within that time. If this process has just started, or did not run for
a while, an agent that has not reconnected may report the root. Held exits then wait until every rank of the generation has
been reported, for at most `agents_s`. If most ranks have ended, held exits wait for the others for at most `gather_s`: the root
may be a rank that ends with code 0, which takes the longer the more memory it frees.

If no root is reported, the finding names, in this order:

* the rank whose collective calls differ from those of the majority (`desync`);
* the rank that has ended with code 0 while the others needed it;
* no rank and no node, with low confidence, because the order of several communication errors proves nothing.

Failures after the root are cascading and are not reported.

A lost node explains collective errors, but no other failure, for `explained_s`: if the supervisor confirms the loss, it stops
the generation within that time. If the loss is withdrawn because the node has reconnected, it explains nothing.

Signals of several nodes arrive in any order. If a late signal shows a better root (a failure that is earlier by more than
`skew_s`, or a rank's own failure instead of a collective error), a new finding with `supersedes=<id>` in its evidence replaces
the first one. On one node, the monotonic clock gives the order of failures. Between nodes, each failure is dated by the clock
of its own node, relative to the newest step that both ranks have finished. Without such a step the clocks of the two machines
are compared.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors import repeated_exception
from holdfast.diagnostics.detectors.blame import Blame, Context, blame, may_be_the_nodes
from holdfast.diagnostics.detectors.desync import odd_one_out
from holdfast.diagnostics.detectors.error_class import ErrorClass, class_of, is_usage
from holdfast.diagnostics.detectors.exit_cause import Cause, cause_of, earlier_by, first_of, is_clean, is_failure
from holdfast.diagnostics.detectors.exit_report import report, when
from holdfast.diagnostics.detectors.protocol import Findings, Observed, TelemetryGap
from holdfast.diagnostics.roster import Generation, Roster, RunStarted
from holdfast.domain.findings import Finding, FindingKind, Severity, StepRecord
from holdfast.domain.signals import (
    ClockTick,
    GenerationStarted,
    GenerationStopped,
    KernelEvent,
    KernelLine,
    WorkerExited,
)

_KEPT_MAX = 4096  # entries of each table; the oldest are dropped first

Key = tuple[str, int]  # (job, generation)


@dataclass(slots=True)
class _Generation:
    """The exits of one generation."""

    exited: set[int] = field(default_factory=set)  # ranks that failed; a repeated report is not counted again
    ended: dict[int, WorkerExited] = field(default_factory=dict)  # ranks that ended with code 0
    root: WorkerExited | None = None
    root_cause: Cause = Cause.COLLECTIVE
    root_id: str = ""
    root_found_at: float = 0.0
    held: list[WorkerExited] = field(default_factory=list)
    held_at: float = 0.0
    hold_until: float = 0.0
    recorded: bool = False  # some held exits contain the calls of a flight recorder
    lost: set[str] = field(default_factory=set)  # lost nodes, which explain collective errors


@dataclass(slots=True)
class ExitState:
    generations: Bounded[Key, _Generation] = field(default_factory=lambda: Bounded(_KEPT_MAX))
    # Job → fingerprint → failure.
    failures: Bounded[str, dict[str, repeated_exception.Failure]] = field(default_factory=lambda: Bounded(_KEPT_MAX))
    steps: Bounded[str, int] = field(default_factory=lambda: Bounded(_KEPT_MAX))  # job → newest step of every rank
    holding: set[Key] = field(default_factory=set)
    # node → newest hardware finding
    hardware: Bounded[str, Finding] = field(default_factory=lambda: Bounded(_KEPT_MAX))
    # Node → diagnostics' clock, and what the kernel reported.
    out_of_memory: Bounded[str, tuple[float, str]] = field(default_factory=lambda: Bounded(_KEPT_MAX))
    # Job → node on which the job failed → diagnostics' clock.
    places: Bounded[str, dict[str, float]] = field(default_factory=lambda: Bounded(_KEPT_MAX))
    # Node → jobs that failed on this node in a way that a broken node can cause, and that had ranks on other nodes as well.
    jobs_failed_by_node: Bounded[str, set[str]] = field(default_factory=lambda: Bounded(_KEPT_MAX))
    looking_since: float | None = None  # diagnostics' clock: the start, or the end of the last gap in the telemetry


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """Reports WORKER_CRASH, WORKER_EXCEPTION and, instead of the latter, REPEATED_EXCEPTION."""

    reads: ClassVar = (
        WorkerExited,
        GenerationStarted,
        GenerationStopped,
        StepRecord,
        Finding,
        KernelLine,
        ClockTick,
        RunStarted,
        TelemetryGap,
    )
    initial = ExitState
    hold_s: float = 0.3  # delay of collective errors, in which their root may be reported
    agents_s: float = 5.0  # longest delay while agents have not reconnected since this process started
    gather_s: float = 2.0  # longest delay for ranks that have not ended, if most have, or flight recorders show calls
    explained_s: float = 10.0  # delay in which the supervisor may stop a generation with a lost node
    skew_s: float = 0.1  # assumed difference of the clocks of two nodes
    correct_within_s: float = 10.0  # a later correction would come after the recovery
    near_s: float = 60.0  # a hardware finding explains failures of its node within this time
    memory_s: float = 86_400.0  # failures of other jobs on a node count for this long
    early_s: float = 300.0  # after the start of a generation; a later failure before the first step is not an early one

    def observe(self, state: ExitState, item: Observed, now: float, roster: Roster) -> tuple[ExitState, Findings]:
        if state.looking_since is None or isinstance(item, TelemetryGap):
            state.looking_since = now
        match item:
            case ClockTick():
                return state, self._expire(state, now, roster) if state.holding else ()
            case WorkerExited():
                return state, self._exited(state, item, now, roster)
            case StepRecord():
                state.steps[item.job] = item.step
                if known := state.failures.get(item.job):
                    state.failures[item.job] = repeated_exception.got_past(known, item.step)
            case GenerationStarted():
                _drop_held(state, item.job, before=item.generation)
            case GenerationStopped():
                generation = state.generations.get((item.job, item.generation))
                if generation is not None and generation.lost and not item.finished:
                    _drop_held(state, item.job, before=item.generation + 1)
            case RunStarted():
                state.failures.pop(item.job, None)
                state.steps.pop(item.job, None)
                for key in [key for key in state.generations if key[0] == item.job]:
                    del state.generations[key]
                    state.holding.discard(key)
            case Finding(kind=FindingKind.NODE_LOST) if item.job:
                self._lost_or_reconnected(state, item, now)
            case Finding(kind=FindingKind.GPU_ERROR) if item.severity in (Severity.ERROR, Severity.FATAL):
                state.hardware[item.node] = item
            case KernelLine(event=KernelEvent.OOM_KILL):
                state.out_of_memory[item.node] = (now, item.text)
            case _:
                pass
        return state, ()

    def _exited(self, state: ExitState, exit_: WorkerExited, now: float, roster: Roster) -> tuple[Finding, ...]:
        key = (exit_.job, exit_.generation)
        generation = state.generations.get_or_add(key, _Generation)
        if is_clean(exit_):
            generation.ended[exit_.rank] = exit_
        if exit_.rank in generation.exited:
            return ()
        placed = roster.generation(*key)
        if not is_failure(exit_) or (placed is not None and exit_.node in placed.left):
            if generation.root is not None:  # stopped because of the root; may have raised the same exception before
                self._count_same_exception(state, generation.root, exit_)
            return ()
        generation.exited.add(exit_.rank)
        cause = cause_of(exit_)
        if generation.root is not None:
            if cause is Cause.OWN:
                self._count_same_exception(state, generation.root, exit_)
            return self._correct(state, generation, exit_, cause, now, roster)
        if cause is Cause.OWN:
            return (self._found(state, generation, exit_, cause, "", now, roster),)
        if not generation.held:
            generation.held_at = now
            generation.hold_until = now + (self.explained_s if generation.lost else self.hold_s)
            state.holding.add(key)
        generation.held.append(exit_)
        generation.recorded = generation.recorded or (exit_.error is not None and bool(exit_.error.call))
        return ()

    def _lost_or_reconnected(self, state: ExitState, item: Finding, now: float) -> None:
        """Hold collective errors of the other nodes longer while a node is lost, until it reconnects."""
        generation = state.generations.get_or_add((item.job, item.generation), _Generation)
        if item.severity in (Severity.ERROR, Severity.FATAL):
            generation.lost.add(item.node)
            generation.hold_until = now + self.explained_s
        elif item.severity is Severity.INFO:
            generation.lost.discard(item.node)
            if not generation.lost:
                generation.hold_until = min(generation.hold_until, now + self.hold_s)

    def _count_same_exception(self, state: ExitState, root: WorkerExited, exit_: WorkerExited) -> None:
        """Count the node if its rank raised the same exception as the root. Crashes, device errors and collective errors are
        not counted: they spread from rank to rank, and may appear in the same line of the script as the root failure. A refused
        command line does not spread."""
        if exit_.error is None or root.error is None:
            if not (is_usage(exit_) and is_usage(root)):
                return
        elif exit_.error.type != root.error.type or class_of(exit_.error) is ErrorClass.DEVICE:
            return
        print_ = repeated_exception.fingerprint_of(root)
        known = state.failures.get(exit_.job, {}).get(print_)
        if known is not None and print_ == repeated_exception.fingerprint_of(exit_):
            same = repeated_exception.judge(
                known, print_, step=exit_.step, generation=exit_.generation, early=known.early, node=exit_.node
            )
            state.failures[exit_.job][print_] = same

    def _correct(
        self,
        state: ExitState,
        generation: _Generation,
        exit_: WorkerExited,
        cause: Cause,
        now: float,
        roster: Roster,
    ) -> tuple[Finding, ...]:
        """Replace the finding if this late exit is a better root; otherwise treat the exit as a cascading failure."""
        assert generation.root is not None
        if cause is Cause.COLLECTIVE or now - generation.root_found_at > self.correct_within_s:
            return ()
        earlier_s = earlier_by(exit_, generation.root)
        enough_s = -self.skew_s if generation.root_cause is Cause.COLLECTIVE else self.skew_s
        if earlier_s < enough_s:
            return ()
        return (self._found(state, generation, exit_, cause, "", now, roster, supersedes=generation.root_id),)

    def _expire(self, state: ExitState, now: float, roster: Roster) -> tuple[Finding, ...]:
        """Report collective errors whose root was not reported in time. The delay also ends if the clock was set back."""
        findings: list[Finding] = []
        for key in sorted(state.holding):
            generation = state.generations.get(key)
            if generation is None:
                state.holding.discard(key)
                continue
            if generation.hold_until - self.explained_s <= now < generation.hold_until:
                continue
            placed = roster.generation(*key)
            if now - generation.held_at >= 0.0 and self._may_come(state, generation, placed, now):
                continue
            root = _likely_root(generation, self.skew_s)
            findings.append(self._found(state, generation, *root, now, roster))
        return tuple(findings)

    def _may_come(self, state: ExitState, generation: _Generation, placed: Generation | None, now: float) -> bool:
        """Whether the root may still be reported: by an agent that has not connected yet, or for a rank that has not ended."""
        since = now if state.looking_since is None else state.looking_since
        world_size = 0 if placed is None else placed.world_size
        if not _is_complete(placed) and now - since < self.agents_s:
            return True
        if now - generation.held_at >= self.gather_s:
            return False
        ended = len(generation.exited | generation.ended.keys())
        return ended < world_size and (generation.recorded or 2 * ended >= world_size)

    def _found(
        self,
        state: ExitState,
        generation: _Generation,
        exit_: WorkerExited,
        cause: Cause,
        why: str,
        now: float,
        roster: Roster,
        supersedes: str = "",
    ) -> Finding:
        """Make `exit_` the root of its generation and report it."""
        placed = roster.generation(exit_.job, exit_.generation)
        early = self._early(placed, exit_)
        failure = self._recurrence(state, exit_, cause, early=early)
        began = roster.began_at(exit_.job)
        judged = repeated_exception.left_again(failure)
        if cause is Cause.OWN:
            judged = self._blame(state, placed, exit_, failure, began, now)
        place = when(exit_, state.steps.get(exit_.job, 0), early)
        finding = report(
            exit_, cause, failure, judged, place, cascading=len(generation.held), supersedes=supersedes, now=now
        )
        if cause is Cause.COLLECTIVE:
            if why:
                finding = _out_of_step(finding, why)
            elif not is_clean(exit_):
                finding = _root_unknown(finding, placed)
        generation.root, generation.root_cause = exit_, cause
        generation.root_id, generation.root_found_at = finding.id, now
        _release(state, (exit_.job, exit_.generation), generation)
        return finding

    def _early(self, placed: Generation | None, exit_: WorkerExited) -> bool:
        return placed is not None and placed.started_at is not None and exit_.at - placed.started_at <= self.early_s

    def _recurrence(
        self, state: ExitState, exit_: WorkerExited, cause: Cause, *, early: bool
    ) -> repeated_exception.Failure | None:
        """Count the occurrences of this exception, signal or exit code; None for collective errors and external signals."""
        fingerprint = repeated_exception.fingerprint_of(exit_)
        if exit_.learned_start:  # says nothing about the script: the next start differs
            return None
        if not fingerprint or (cause is not Cause.OWN and not is_clean(exit_)):
            return None
        known = state.failures.get(exit_.job, {})
        failure = repeated_exception.judge(
            known.get(fingerprint),
            fingerprint,
            step=exit_.step,
            generation=exit_.generation,
            early=early,
            node=exit_.node,
        )
        state.failures[exit_.job] = repeated_exception.remembered(known, failure)
        return failure

    def _blame(
        self,
        state: ExitState,
        placed: Generation | None,
        exit_: WorkerExited,
        failure: repeated_exception.Failure | None,
        began_at: float | None,
        now: float,
    ) -> Blame:
        places = state.places.get(exit_.job, {})
        places[exit_.node] = now
        state.places[exit_.job] = places
        failed_here = {job for job in state.jobs_failed_by_node.get(exit_.node, ()) if job in state.places}
        others = failed_here - {exit_.job}
        at, line = state.out_of_memory.get(exit_.node, (-math.inf, ""))
        out_of_memory = line if abs(now - at) <= self.near_s else ""
        if placed is not None and placed.spread and may_be_the_nodes(exit_, host_oom=bool(out_of_memory)):
            # The absence of failures on other nodes is evidence against this node only if the job has ranks on other nodes.
            state.jobs_failed_by_node[exit_.node] = failed_here | {exit_.job}
        hardware, began = state.hardware.get(exit_.node), exit_.at if began_at is None else began_at
        # A finding from before the first start of the job was known when the job was placed on this node.
        explains = hardware is not None and hardware.at >= began and abs(now - hardware.at) <= self.near_s
        early = self._early(placed, exit_)
        before_first_step = exit_.step == 0 and not exit_.observed and exit_.job not in state.steps
        context = Context(
            hardware=hardware.summary if hardware is not None and explains else "",
            host_oom=out_of_memory,
            tries=failure.tries if failure is not None else 1,
            nodes=len(failure.nodes) if failure is not None else 1,
            other_jobs=sum(_failed_here_only(state, job, exit_.node, now - self.memory_s) for job in others),
            after_s=max(0.0, exit_.at - began),
            before_first_step=before_first_step,
            early=early,
            first_start=before_first_step and early and exit_.at - began <= self.early_s,
            alone=placed is not None and placed.world_size > 0 and not placed.spread,
        )
        return blame(exit_, context)


def _failed_here_only(state: ExitState, job: str, node: str, after: float) -> bool:
    places = state.places.get(job, {})
    return len(places) == 1 and places.get(node, -math.inf) >= after


def _likely_root(generation: _Generation, skew_s: float) -> tuple[WorkerExited, Cause, str]:
    """Select the rank to report among ranks that failed in collectives: its exit, its cause, and why it is the root ("" = not
    known)."""
    first = first_of(generation.held)
    assert first is not None  # a generation in `holding` has at least one held exit
    odd = odd_one_out(generation.held)
    if odd is not None:
        rank, why = odd
        return next(exit_ for exit_ in generation.held if exit_.rank == rank), Cause.COLLECTIVE, why
    left = first_of(generation.ended.values())
    if left is not None and earlier_by(left, first) >= -skew_s:
        return left, Cause.COLLECTIVE, ""
    return first, Cause.COLLECTIVE, ""


def _out_of_step(finding: Finding, why: str) -> Finding:
    """Name the rank whose calls differ from the others'. The cause is usually the script's control flow, not the node."""
    who = f"Rank {finding.rank} on {finding.node} is out of step with the others: {why}; their collectives failed."
    evidence = {**finding.evidence, "root": "out of step", "because": why}
    return replace(finding, summary=who, confidence=0.8, evidence=evidence)


def _root_unknown(finding: Finding, placed: Generation | None) -> Finding:
    """Name no rank, because the root is not known, and name the node only if the job is known to run on a single node. Before
    any start of the generation is reported, the number of its ranks is not known."""
    evidence = {**finding.evidence, "first": f"rank {finding.rank} on {finding.node}"}
    if placed is not None and placed.world_size and len(placed.nodes) == 1 and _is_complete(placed):
        return replace(finding, evidence=evidence)
    return replace(finding, node="", rank=None, evidence=evidence)


def _is_complete(placed: Generation | None) -> bool:
    """Whether every rank of the generation has been reported to this process, by its start or its exit."""
    return placed is None or len(placed.node_of) >= placed.world_size


def _release(state: ExitState, key: Key, generation: _Generation) -> None:
    generation.held.clear()
    generation.recorded = False
    state.holding.discard(key)


def _drop_held(state: ExitState, job: str, before: int) -> None:
    """Drop the held exits of generations of `job` with a number below `before`: these generations are over."""
    for key in [key for key in state.holding if key[0] == job and key[1] < before]:
        generation = state.generations.get(key)
        if generation is not None:
            _release(state, key, generation)
