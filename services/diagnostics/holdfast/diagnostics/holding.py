"""Repeats findings that still hold, so that a lost entry of the event log does not lose the finding. Pure.

Theory of operation. A finding of severity error or fatal about a generation holds until the generation is stopped or replaced,
or has finished a step on every rank. The finding about a lost node holds until its agent reconnects. Any finding ends when
another finding supersedes it. While a finding holds, it is repeated after 30 s and then at intervals that double, up to
8 minutes. A repeat has the same id and the same `at`, by which the supervisor recognises it, and a higher `repeat`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.domain.findings import Finding, FindingKind, Severity, StepRecord

REPEAT_FIRST_S = 30.0
REPEAT_S_MAX = 480.0
_HELD_MAX = 4096
_REPORTS_LAG_S = 5.0  # a step that was finished before a fault may be reported up to this long after the fault
_CALL_FOR_ACTION = (Severity.ERROR, Severity.FATAL)


@dataclass(slots=True)
class _Held:
    finding: Finding
    next_at: float  # diagnostics' clock
    interval_s: float = REPEAT_FIRST_S


class Holding:
    """The reported findings that still hold, by id."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}  # by id; at most `_HELD_MAX`, the oldest first
        self._of_job: dict[str, dict[str, None]] = {}  # job → the ids of its findings
        self._next_at = float("inf")

    def reported(self, finding: Finding) -> None:
        """Record a finding that is reported for the first time."""
        self._drop(finding.supersedes)
        if finding.kind is FindingKind.NODE_LOST and finding.severity is Severity.INFO:
            self._drop(finding.contradicts)
        if not finding.job or finding.severity not in _CALL_FOR_ACTION:
            return
        self.over(finding.job, before=finding.generation)
        self._drop(finding.id)
        self._held[finding.id] = _Held(finding, finding.at + REPEAT_FIRST_S)
        self._of_job.setdefault(finding.job, {})[finding.id] = None
        if len(self._held) > _HELD_MAX:
            self._drop(next(iter(self._held)))
        self._next_at = min(self._next_at, finding.at + REPEAT_FIRST_S)

    def over(self, job: str, *, before: int | None = None) -> None:
        """Drop the findings about generations of `job` with a number below `before`; None = all findings about the job."""
        for held in self._of(job):
            if before is None or held.finding.generation < before:
                self._drop(held.finding.id)

    def stepped(self, record: StepRecord, now: float) -> None:
        """Drop findings that a finished step disproves: every rank has finished it, so no rank is lost, dead or hung. Fatal
        findings are kept, because hardware may still be broken."""
        for held in self._of(record.job):
            finding = held.finding
            recent = now - finding.at <= _REPORTS_LAG_S
            if finding.generation == record.generation and finding.severity is not Severity.FATAL and not recent:
                self._drop(finding.id)

    def _of(self, job: str) -> list[_Held]:
        return [self._held[identifier] for identifier in self._of_job.get(job, ())]

    def _drop(self, identifier: str) -> None:
        held = self._held.pop(identifier, None)
        if held is None:
            return
        ids = self._of_job[held.finding.job]
        del ids[identifier]
        if not ids:
            del self._of_job[held.finding.job]

    def due(self, now: float) -> tuple[Finding, ...]:
        """The findings to repeat now. Even if the clock was set back, no repeat waits longer than its interval."""
        if now < self._next_at and (not self._held or self._next_at - now <= REPEAT_S_MAX):
            return ()
        repeats = []
        for held in self._held.values():
            if held.next_at - held.interval_s <= now < held.next_at:
                continue
            waited_s = max(0.0, now - held.finding.at)
            held.finding = replace(held.finding, repeat=held.finding.repeat + 1, waited_s=waited_s)
            held.interval_s = min(2 * held.interval_s, REPEAT_S_MAX)
            held.next_at = now + held.interval_s
            repeats.append(held.finding)
        self._next_at = min((held.next_at for held in self._held.values()), default=float("inf"))
        return tuple(repeats)
