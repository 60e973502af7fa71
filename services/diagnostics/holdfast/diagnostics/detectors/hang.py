"""Detects hangs: no rank of a generation makes progress for longer than its history explains.

Theory of operation, per (job, generation). *Progress* means that a rank finishes a step; *activity* is progress or a change of
phase. A *stall* is a time without activity. The allowed duration of a stall is the first of these that applies:

* `max(stuck_s, factor × p99)` if the stall is *proven* (`proof`); p99 is that of the job's step times (`rhythm`). `gone_s`
  instead of `stuck_s` for a dead process: it may still free its memory, and its exit, which has the cause, follows;
* `init_s` if any rank is in another phase than `step`, or the generation is in its first steps. Compiling, restoring,
  evaluating and saving may take long, and the first steps do not show the job's rhythm;
* `init_s` if ranks still enter collectives, because a long step is not a hang;
* otherwise `max(floor_s, factor × p99)`, and more at a position where the job has paused before. After that time only a
  warning is reported, because the stall may be a pause that the script did not announce. After `unproven` times as long, at
  most `init_s`, an error is reported. If all ranks may be computing (they use CPU time, none stands out, and no recorder shows
  a rank that waits), the error is reported only after `init_s`, because an evaluation by all ranks looks the same.

A script that does not use `holdfast.train` reports no progress. For its ranks, only a process that stays stopped, dead or
traced is reported; the stall begins with the first report of that state. A rank that has ended with code 0 is not waited for.

After `baseline_s` the CPU time of every rank is stored as a *baseline*, which shows later which ranks have worked since. A
diagnosis uses the agents' reports about silent ranks (`StallSnapshot`), and waits for them for `evidence_s` beyond the
allowance unless a process is dead or stopped. It needs a report of every node from after the allowance: `liveness` handles a
node without contact, and after a suspension of diagnostics itself the reports are too old. Each stall leads to at most one
warning and one error. Activity ends the stall.

A lost node explains a stall for `explained_s`. If the generation is neither stopped nor makes progress in that time, or the
node reconnects, the stall is judged after all, without the lost node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from holdfast.diagnostics.detectors.protocol import Findings, Observed, TelemetryGap
from holdfast.diagnostics.detectors.stall import Rule, Stall, look, may_compute, report
from holdfast.diagnostics.detectors.watched import (
    FIRST_STEPS,
    TICK_S,
    HangState,
    Watched,
    active,
    all_reported,
    ended,
    evidence_of,
    explained,
    judged,
    lacks_evidence,
    leave,
    opened,
    progress,
    stalled,
    stepped,
    still_by_agents,
    stopped,
    usual_s,
)
from holdfast.diagnostics.roster import Roster, RunStarted
from holdfast.domain.collectives import StallSnapshot
from holdfast.domain.findings import Finding, Severity, StepRecord
from holdfast.domain.signals import (
    ClockTick,
    GenerationStarted,
    NodeDisconnected,
    RankProgress,
    WorkerExited,
)


@dataclass(frozen=True, slots=True)
class Hang:
    reads: ClassVar = (
        RankProgress,
        StallSnapshot,
        ClockTick,
        StepRecord,
        GenerationStarted,
        NodeDisconnected,
        WorkerExited,
        Finding,
        TelemetryGap,
        RunStarted,
    )
    initial = HangState
    stuck_s: float = 2.0  # shortest time after which a proven stall is reported
    gone_s: float = 10.0  # the same, if processes are dead and none is stopped
    unproven: float = 10.0  # multiple of the allowance after which a stall that is not proven is an error as well
    baseline_s: float = 1.0  # time without activity after which a baseline is taken
    report_s: float = 0.9  # a process counts as stopped or dead after this time: in two reports of its agent
    fresh_s: float = 3.0  # a stall is not judged while some node has not reported for longer than this
    # How long a diagnosis waits for flight recorders and stacks: one tick, and time for the answers.
    evidence_s: float = 1.5
    explained_s: float = 10.0  # how long a lost node explains a stall

    def observe(self, state: HangState, item: Observed, now: float, roster: Roster) -> tuple[HangState, Findings]:
        match item:
            case RankProgress():
                progress(state, item, now, roster)
            case StallSnapshot():
                known = state.of(item)
                if known is not None:
                    known.standing[item.node], known.looked = item, None
            case ClockTick():
                return state, self._conclude(state, now)
            case StepRecord():
                stepped(state, item, now)
            case GenerationStarted():
                opened(state, item, now, roster)
            case NodeDisconnected(clean=True):
                for job in roster.on(item.node):
                    if job in state.jobs:
                        leave(state.jobs[job], item.node)
            case WorkerExited(exit_code=0, signal=None):
                ended(state, item)
            case Finding():
                explained(state, item, now)
            case RunStarted():
                state.jobs.pop(item.job, None)
            case TelemetryGap():
                for generation in state.jobs.values():
                    active(generation, now)
                    generation.signalled_at.clear()
                    generation.traced_at.clear()
            case _:
                pass
        return state, ()

    # ------------------------------------------------------------------ conclusions

    def _conclude(self, state: HangState, now: float) -> tuple[Finding, ...]:
        findings = []
        for generation in state.jobs.values():
            still_s = now - generation.active_at
            if generation.generation.over or not generation.latest or still_s < self.baseline_s / 2:
                continue
            if generation.settled or (generation.lost and now - generation.lost_at < self.explained_s):
                continue
            stall = generation.stall
            if stall is None:
                if still_s < min(self.baseline_s, generation.hang.floor_s / 2):
                    continue
                stall = generation.stall = stalled(generation, now)
            if stall.done:
                continue
            rule = self._proven(generation, stall, now) or self._unproven(generation, stall, now)
            if rule is None:
                continue
            finding = report(generation.generation, evidence_of(generation, stall), rule, now)
            if finding is None:
                continue
            generation.warned = True
            generation.settled = rule.severity is Severity.ERROR
            findings.append(finding)
        return tuple(findings)

    def _proven(self, generation: Watched, stall: Stall, now: float) -> Rule | None:
        """The rule of a proven stall, if the stall exceeds the rule's allowance."""
        signalled = self._lasting(generation, generation.signalled_at, self.report_s)
        reported = generation.has_reported and generation.steps >= FIRST_STEPS and stall.only_stepping
        if not signalled and not (reported and all_reported(generation)):
            return None
        least_s = self.gone_s if signalled and not stopped(generation) else self.stuck_s
        allowance_s = max(least_s, generation.hang.factor * generation.rhythm.slow_s)
        # The checks below read the reports of every node. Return early if none of them can succeed.
        began = generation.still_since
        if now < generation.prove_at or now - began + TICK_S < allowance_s:
            return None
        still_s = max(now - began, still_by_agents(generation, now))
        if still_s < allowance_s or self._lacks_reports(generation, now, began + self.baseline_s):
            return None
        generation.prove_at = now + self.baseline_s
        evidence = evidence_of(generation, stall)
        if generation.looked is None:
            generation.looked = look(evidence)
        proof = generation.looked.proof(evidence, now)
        if not proof:
            return None
        pause_s = generation.hang.factor * generation.rhythm.pause_s(generation.step)
        if not signalled and (still_s < pause_s or now - generation.moved_at < self.stuck_s):
            return None  # the job has paused here before
        words = f"{proof}: max({least_s:g} s, {generation.hang.factor:g} × p99 step time)"
        return Rule(words, still_s, allowance_s, Severity.ERROR, generation.looked)

    def _unproven(self, generation: Watched, stall: Stall, now: float) -> Rule | None:
        """The rule of a stall that may end by itself, if the stall exceeds its allowance: first a warning, later an error."""
        still_s = now - generation.still_since
        allowance_s, words = self._allowance(generation, stall, now)
        if still_s < allowance_s:
            return None
        init_s = generation.hang.init_s
        error_s = max(allowance_s, min(self.unproven * allowance_s, init_s))
        if self._traced(generation):
            error_s = allowance_s
        if generation.warned and (still_s < error_s or now < generation.computes_until):
            return None
        if self._lacks_reports(generation, now, generation.still_since + allowance_s):
            return None
        bar_s = error_s if generation.warned else allowance_s
        if still_s < bar_s + self.evidence_s and lacks_evidence(generation):
            return None
        if still_s < error_s:
            return Rule(words, still_s, allowance_s, Severity.WARNING)
        if still_s < init_s and error_s > allowance_s and may_compute(evidence_of(generation, stall), now):
            # Checking 100,000 ranks takes long, so the check is repeated only after one more allowance.
            generation.computes_until = min(now + allowance_s, generation.active_at + max(init_s, error_s))
            return None if generation.warned else Rule(words, still_s, allowance_s, Severity.WARNING)
        if error_s > allowance_s:
            words = f"{self.unproven:g} × {words}" if error_s < init_s else f"init_s, beyond {words}"
        return Rule(words, still_s, error_s, Severity.ERROR)

    def _allowance(self, generation: Watched, stall: Stall, now: float) -> tuple[float, str]:
        """The allowed seconds without activity, and the rule as text."""
        hang, rhythm = generation.hang, generation.rhythm
        if not self._traced(generation):
            if not generation.has_reported:
                return math.inf, "never: the script reports no progress"
            if generation.steps < FIRST_STEPS or not rhythm.known:
                return hang.init_s, "init_s: too few steps finished to know the rhythm"
            if not stall.only_stepping:
                return hang.init_s, "init_s: a rank is in another phase than step"
            if now - generation.moved_at < hang.floor_s:
                return hang.init_s, "init_s: collectives are still entered"
            if (pause_s := rhythm.pause_s(generation.step)) > 0:
                return max(
                    usual_s(generation), hang.factor * pause_s
                ), f"{hang.factor:g} × a pause of {pause_s:.1f} s here"
        if hang.factor * rhythm.slow_s > hang.floor_s:
            return hang.factor * rhythm.slow_s, f"{hang.factor:g} × p99 step time of {rhythm.slow_s:.2f} s"
        return hang.floor_s, "floor_s"

    def _traced(self, generation: Watched) -> bool:
        """Whether a process is traced for longer than by a profiler, or processes stay stopped or dead for that long."""
        floor_s = generation.hang.floor_s - TICK_S  # reports come once a second
        return self._lasting(generation, generation.traced_at, floor_s) or self._lasting(
            generation, generation.signalled_at, floor_s
        )

    def _lasting(self, generation: Watched, since: dict[str, float], for_s: float) -> bool:
        """Whether some node has reported the state for `for_s`: its newest report is that much later than its first."""
        return any(generation.heard_at[node] - at >= for_s - 1e-6 for node, at in since.items())

    def _lacks_reports(self, generation: Watched, now: float, since: float) -> bool:
        """Whether some node has not reported within `fresh_s`, or not after `since`: its ranks may have made progress."""
        return any(
            now - (reported_at := generation.heard_at[node]) > self.fresh_s or reported_at < since - 1e-6
            for node in judged(generation)
        )
