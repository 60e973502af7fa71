"""Writes the finding about a worker's exit: summary and evidence. Pure."""

from __future__ import annotations

from holdfast.diagnostics.detectors import repeated_exception
from holdfast.diagnostics.detectors.blame import FROM_OUTSIDE, Blame, Who
from holdfast.diagnostics.detectors.error_class import ErrorClass, mistake
from holdfast.diagnostics.detectors.exit_cause import Cause, ending, failed_at, in_a_sentence, is_clean
from holdfast.domain.findings import DATED, ESTIMATE, Attribution, Blamed, Finding, FindingKind, Remedy, Severity
from holdfast.domain.signals import WorkerExited

_FRAMES_MAX = 12  # innermost frames, in the evidence
_LOG_LINES_MAX = 10
COMMUNICATION = "communication"  # the error class of collective errors without a known root


def when(exit_: WorkerExited, finished: int, early: bool) -> str:
    """When the rank failed, as part of a sentence. `finished`: the newest step that every rank has finished; 0 = not known."""
    if exit_.step > 0:
        return f"after step {exit_.step}"
    if exit_.observed:
        return f"after {exit_.observed} optimizer step{'s' if exit_.observed > 1 else ''} (observed: the script reports none)"
    if finished:
        return f"before its first step after a restart (the job had finished step {finished})"
    return "before its first step" if early else "without having reported a step"


def _dated(exit_: WorkerExited, cause: Cause) -> str:
    if cause is Cause.COLLECTIVE:
        return f"{ESTIMATE}the first communication error that was reported; its cause occurred before"
    return "the time of the exception" if failed_at(exit_) < exit_.at else "the end of the process by the agent's clock"


def report(
    exit_: WorkerExited,
    cause: Cause,
    failure: repeated_exception.Failure | None,
    judged: Blame | None,
    place: str,
    *,
    cascading: int,
    supersedes: str,
    now: float,
) -> Finding:
    """Report `exit_`, the root of its generation. `cascading`: number of other ranks that failed in collectives."""
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
    evidence[DATED] = _dated(exit_, cause)
    summary = f"{where} {ending(exit_)} {place}."
    if judged is not None and exit_.error is None:
        if judged.error is ErrorClass.USAGE and exit_.log_tail:
            summary = f"{where} {ending(exit_)} {place}: {in_a_sentence(mistake(exit_.log_tail))}."
        elif judged.error is ErrorClass.HOST_OOM:
            summary = f"{where} {ending(exit_)} {place}: {in_a_sentence(judged.why)}."
    kind = FindingKind.WORKER_CRASH if exit_.error is None else FindingKind.WORKER_EXCEPTION
    confidence = 0.95
    recommended_actions: tuple[Remedy, ...] = (Remedy.RESTART_PROCESS, Remedy.REPLACE_NODE)
    if cause is Cause.COLLECTIVE:
        evidence["root"] = "left early" if is_clean(exit_) else "not seen"
        evidence["collective_errors"] = str(max(1, cascading))
    if failure is not None and failure.tries > 1 and judged is not None and judged.who is Who.USER:
        kind, recommended_actions = FindingKind.REPEATED_EXCEPTION, (Remedy.STOP_JOB,)
        evidence["tries"] = str(failure.tries)
        evidence["nodes"] = str(len(failure.nodes))
        evidence["step"] = str(failure.step)
        at = f"after step {failure.step}" if failure.step > 0 else place
        how = f"{ending(exit_)} {at}{' while others continued' if cause is Cause.COLLECTIVE else ''}"
        summary = f"{where} {how}, for the {_ordinal(failure.tries)} time: a restart does not help."
    elif cause is Cause.COLLECTIVE and is_clean(exit_):
        confidence, recommended_actions = 0.8, (Remedy.RESTART_PROCESS,)
        summary = (
            f"{where} ended with exit code 0 {place} while others continued, and their communication with it failed."
        )
    elif cause is Cause.COLLECTIVE:
        confidence, recommended_actions = 0.3, (Remedy.RESTART_PROCESS,)
        evidence["error_class"] = COMMUNICATION
        summary = (
            f"{where} {ending(exit_)} {place}: a communication error, and no rank or node that failed first is known."
        )
    elif judged is not None and judged.who is Who.HARDWARE:
        recommended_actions = (Remedy.REPLACE_NODE,)
    elif exit_.error is not None:
        recommended_actions = (Remedy.RESTART_PROCESS,)
    attribution = Attribution(
        blame=Blamed(judged.who.value) if judged is not None else Blamed.NOT_JUDGED,
        error_class=evidence.get("error_class", ""),
        prior_user=judged.prior_user if judged is not None else 0.0,
        from_outside=exit_.signal in FROM_OUTSIDE if exit_.signal is not None else None,
        tries=failure.tries if failure is not None and kind is FindingKind.REPEATED_EXCEPTION else 0,
        nodes=len(failure.nodes) if failure is not None and kind is FindingKind.REPEATED_EXCEPTION else 0,
        observed_steps=exit_.observed,
    )
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
        supersedes=supersedes,
        attribution=attribution,
        recommended_actions=recommended_actions,
        traceparent=exit_.traceparent,
    )


def _ordinal(n: int) -> str:
    suffix = "th" if 10 <= n % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{suffix}"
