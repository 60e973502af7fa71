"""Detects a loss or a gradient norm that is not a number, or far above its past values.

The values are those that ranks report with each step. A spike is a warning, because many spikes occur in normal training. A
loss that is not finite is a warning at first, and an error after `persist_steps` such steps, because no optimizer recovers from
weights that are NaN. A gradient norm that is not finite remains a warning, because a loss scaler produces such steps on purpose
and skips them. All of these name the last step whose state is verified, by a finite loss in the step after it, and put later
states in doubt. A warning is withdrawn at the next step with a finite loss and gradient norm. Values that come and go lead to
a warning per `doubt_s`, or per `quiet_steps`: from the second time on, a warning is withdrawn after `doubt_s` at the earliest.

After a rollback, steps are repeated with their former losses, which may be far above those of the abandoned steps. The history
of a repeated step, and of all steps after it, is therefore dropped.

The ranks that reported a bad value first are evidence, not the cause: after the reduction every rank has the value.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.protocol import Findings, Observed
from holdfast.diagnostics.detectors.recurring import Recurring
from holdfast.diagnostics.roster import Generation, Roster, RunStarted
from holdfast.diagnostics.thresholds import NumericalThresholds
from holdfast.domain.findings import DATED, Finding, FindingKind, Remedy, Severity, StepRecord
from holdfast.domain.signals import StepColumns

_JOBS_MAX = 4096
_OPEN_MAX = 64  # steps of one generation that some rank has not finished
_RANKS_MAX = 8  # ranks named in the evidence

_MAD_TO_SIGMA = 1.4826
_VALUE_MAX = 1e100  # larger values would overflow


@dataclass(slots=True)
class _Open:
    """The reports of a step so far."""

    bad_loss: list[int] = field(default_factory=list)  # ranks
    bad_grad: list[int] = field(default_factory=list)
    grad_norm: float = math.nan  # the largest; after the reduction all are equal


@dataclass(slots=True)
class _Job:
    generation: Generation
    losses: deque[tuple[int, float]]  # (step, value), steps ascending
    grads: deque[tuple[int, float]]
    open: Bounded[int, _Open] = field(default_factory=lambda: Bounded(_OPEN_MAX))
    finite_step: int = 0  # newest step with a finite loss
    bad_steps: int = 0  # steps in a row without a finite loss
    bad_since: int = 0  # first of these steps
    bad_since_at: float = 0.0  # end of the step `bad_since`, Unix seconds
    first_bad: tuple[int, ...] = ()  # ranks that reported the loss of the step `bad_since`
    reported: Recurring[_Condition] = field(default_factory=Recurring)
    doubt: Finding | None = None  # the newest warning that names a verified step, until it is withdrawn
    doubt_returned: bool = False  # it was withdrawn less than `quiet_steps` before


@dataclass(slots=True)
class NumericalState:
    jobs: Bounded[str, _Job] = field(default_factory=lambda: Bounded(_JOBS_MAX))


@dataclass(frozen=True, slots=True)
class _Condition:
    key: str
    what: str
    severity: Severity
    evidence: dict[str, str]
    members: frozenset[int] = frozenset()
    verified_step: int | None = None


@dataclass(frozen=True, slots=True)
class Numerical:
    """Reports NUMERICAL."""

    reads: ClassVar = (StepColumns, StepRecord, RunStarted)
    initial = NumericalState
    limits: NumericalThresholds = field(default_factory=NumericalThresholds)

    def observe(
        self, state: NumericalState, item: Observed, now: float, roster: Roster
    ) -> tuple[NumericalState, Findings]:
        match item:
            case StepColumns():
                _collect(self._job(state, roster.current(item.job, item.generation)), item)
            case StepRecord():
                job = self._job(state, roster.current(item.job, item.generation))
                return state, self._finished(job, item, now)
            case RunStarted():
                state.jobs.pop(item.job, None)
            case _:
                pass
        return state, ()

    def _job(self, state: NumericalState, generation: Generation | None) -> _Job | None:
        """The state of the job; None without a current generation. A new generation keeps the history of healthy steps."""
        if generation is None:
            return None
        job = state.jobs.get(generation.job)
        if job is None:
            limit = self.limits.history
            job = state.jobs[generation.job] = _Job(generation, deque(maxlen=limit), deque(maxlen=limit))
        if job.generation is not generation:
            job.generation, job.bad_steps, job.doubt, job.reported = generation, 0, None, Recurring()
            job.open.clear()
        return job

    def _finished(self, job: _Job | None, record: StepRecord, now: float) -> tuple[Finding, ...]:
        if job is None:
            return ()
        reported = job.open.get(record.step, _Open())
        for step in [step for step in job.open if step <= record.step]:
            del job.open[step]
        limits, found = self.limits, list(self._judge(job, record, reported))
        findings: list[Finding] = []
        is_finite = record.loss is not None and not job.bad_steps and not reported.bad_grad
        if job.doubt is not None and is_finite and (not job.doubt_returned or now - job.doubt.at >= limits.doubt_s):
            findings.append(_withdrawal(job.doubt, record, now))
            job.doubt = None
        doubted = -1 if job.doubt is None or job.doubt.verified_step is None else job.doubt.verified_step
        urgent = frozenset(
            each.key
            for each in found
            if each.verified_step is not None and (doubted < 0 or each.verified_step > doubted + limits.quiet_steps)
        )
        for due in job.reported.due(found, record.step, now, limits.quiet_steps, limits.repeat_s, urgent):
            findings.append(finding := _finding(record, due.condition, job, due.times, now))
            if finding.severity is Severity.WARNING and finding.verified_step is not None:
                job.doubt, job.doubt_returned = finding, due.times > 1
        return tuple(findings)

    def _judge(self, job: _Job, record: StepRecord, reported: _Open) -> Iterator[_Condition]:
        limits = self.limits
        loss, grad = record.loss, reported.grad_norm
        job.finite_step = min(job.finite_step, record.step - 1)  # less after a rollback
        for history in (job.losses, job.grads):
            while history and history[-1][0] >= record.step:
                history.pop()
        if reported.bad_loss or (loss is not None and not math.isfinite(loss)):
            job.bad_steps += 1
            if job.bad_steps == 1:
                job.bad_since, job.first_bad = record.step, tuple(sorted(reported.bad_loss)[:_RANKS_MAX])
                job.bad_since_at = record.ended_at
            yield _not_finite(job, record, limits.persist_steps)
        elif loss is not None:
            job.bad_steps, job.finite_step = 0, record.step
            spike = _spike(job.losses, loss, limits.loss_factor, limits)
            if spike is not None:
                yield _Condition("loss", f"has a loss of {loss:.4g}, {spike[0]}", Severity.WARNING, spike[1])
            job.losses.append((record.step, loss))
        if reported.bad_grad:
            ranks = frozenset(reported.bad_grad[:_RANKS_MAX])
            evidence = {"value": "grad_norm", "ranks": ", ".join(map(str, sorted(ranks)))}
            what = "has a gradient norm that is not a number"
            yield _Condition("grad_nan", what, Severity.WARNING, evidence, verified_step=_verified(job))
        elif not math.isnan(grad):
            spike = _spike(job.grads, grad, limits.grad_factor, limits)
            if spike is not None:
                yield _Condition("grad", f"has a gradient norm of {grad:.4g}, {spike[0]}", Severity.WARNING, spike[1])
            job.grads.append((record.step, grad))


def _collect(job: _Job | None, item: StepColumns) -> None:
    if job is None:
        return
    for rank, step, loss, grad in zip(item.rank, item.step, item.loss, item.grad_norm, strict=True):
        if grad != grad and not math.isinf(loss):  # the usual case: no gradient norm, and a finite loss or none
            continue
        reported = job.open.get(step)
        if reported is None:
            reported = job.open[step] = _Open()
        if math.isinf(loss):  # a reported NaN is sent as +inf
            reported.bad_loss.append(rank)
        if math.isinf(grad):
            reported.bad_grad.append(rank)
        elif not reported.grad_norm >= grad:  # also if none is known yet (NaN)
            reported.grad_norm = grad


def _spike(
    history: deque[tuple[int, float]], value: float, factor: float, limits: NumericalThresholds
) -> tuple[str, dict[str, str]] | None:
    """Return text and evidence if `value` is far above its history, else None. Values may be negative, as a loss may be."""
    if len(history) < limits.history_min:
        return None
    values = (each for _, each in history)
    past = np.clip(np.fromiter(values, np.float64, len(history)), -_VALUE_MAX, _VALUE_MAX)
    usual = float(np.median(past[-limits.history_min :]))
    # The noise is estimated from differences between steps, so that the slope of a steeply falling loss is not part of it.
    sigma = _MAD_TO_SIGMA * float(np.median(np.abs(np.diff(past)))) / math.sqrt(2.0)
    if value - usual <= max(limits.z * sigma, (factor - 1.0) * abs(usual)):
        return None
    z = (value - usual) / sigma if sigma > 0 else math.inf
    evidence = {"value": f"{value:.6g}", "usual": f"{usual:.6g}", "sigma": f"{sigma:.3g}", "z": f"{z:.1f}"}
    return f"{z:.0f} deviations above its usual {usual:.4g}", evidence


def _verified(job: _Job) -> int | None:
    """The last step whose state is verified; None if no loss was finite. The loss of a step is computed before its update, so a
    finite one verifies the state after the step before it."""
    return max(0, job.finite_step - 1) if job.finite_step else None


def _not_finite(job: _Job, record: StepRecord, persist_steps: int) -> _Condition:
    lasting = job.bad_steps >= persist_steps
    evidence = {
        "value": "loss",
        "steps": str(job.bad_steps),
        "first_bad_step": str(job.bad_since),
        "ranks": ", ".join(map(str, job.first_bad)),
    }
    if (verified := _verified(job)) is not None:
        evidence["verified_step"] = str(verified)
    how_long = f" for {job.bad_steps} steps" if lasting else ""
    return _Condition(
        key="nan_lasting" if lasting else "nan",
        what=f"has a loss that is not a number{how_long}, since step {job.bad_since}",
        severity=Severity.ERROR if lasting else Severity.WARNING,
        evidence=evidence,
        verified_step=verified,
    )


def _finding(record: StepRecord, condition: _Condition, job: _Job, times: int, now: float) -> Finding:
    lasting = condition.severity is Severity.ERROR
    flapping = f" Occurrences so far: {times}." if times > 1 else ""
    return Finding(
        id=f"numerical:{record.job}:{record.generation}:{condition.key}:{job.bad_since if lasting else record.step}",
        kind=FindingKind.NUMERICAL,
        severity=condition.severity,
        at=now,
        since=min(job.bad_since_at if lasting else record.ended_at, now),
        summary=f"{record.job} {condition.what} (step {record.step}).{flapping}",
        job=record.job,
        generation=record.generation,
        confidence=0.95 if lasting else 0.8,
        evidence={**condition.evidence, "step": str(record.step), "times": str(times), DATED: "the end of that step"},
        verified_step=condition.verified_step,
        recommended_actions=(Remedy.STOP_JOB,) if lasting else (Remedy.WATCH,),
    )


def _withdrawal(doubt: Finding, record: StepRecord, now: float) -> Finding:
    return Finding(
        id=f"{doubt.id}:over",
        kind=FindingKind.NUMERICAL,
        severity=Severity.INFO,
        at=now,
        since=min(record.ended_at, now),
        summary=f"{record.job} has a finite loss again (step {record.step}).",
        job=record.job,
        generation=record.generation,
        contradicts=doubt.id,
        evidence={"contradicts": doubt.id, "step": str(record.step)},
        recommended_actions=(Remedy.WATCH,),
    )
