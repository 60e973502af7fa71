"""Conclusions that still hold are published again, so that an entry of the event log that was lost for good is not final. Pure.

Theory of operation. A finding of a generation that calls for an action holds until the generation is stopped, replaced, or
seen to finish a step on every rank; a lost node until its agent is heard again; any of them until a better root supersedes it.
While it holds it is said again after 30 s, then ever more seldom, at last every 8 minutes: with its id and its `at`, by which
the supervisor knows what it has, and with `repeat` counted up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.diagnostics.bounded import Bounded
from holdfast.domain.findings import Finding, FindingKind, Severity, StepRecord

REPEAT_FIRST_S = 30.0
REPEAT_S_MAX = 480.0
_HELD_MAX = 4096
_REPORTS_LAG_S = 5.0  # steps that were finished before a fault may be reported this much after it
_CALLS = (Severity.ERROR, Severity.FATAL)


@dataclass(slots=True)
class _Held:
    finding: Finding
    next_at: float  # diagnostics' clock
    pause_s: float = REPEAT_FIRST_S


class Holding:
    """What was said and holds, by finding id."""

    def __init__(self) -> None:
        self._held: Bounded[str, _Held] = Bounded(_HELD_MAX)
        self._next_at = float("inf")

    def reported(self, finding: Finding) -> None:
        """A finding leaves for the first time."""
        self._held.pop(finding.evidence.get("supersedes", ""), None)
        if finding.kind is FindingKind.NODE_LOST and finding.severity is Severity.INFO:
            self._held.pop(finding.evidence.get("contradicts", ""), None)
        if not finding.job or finding.severity not in _CALLS:
            return
        self.over(finding.job, before=finding.generation)
        self._held[finding.id] = _Held(finding, finding.at + REPEAT_FIRST_S)
        self._next_at = min(self._next_at, finding.at + REPEAT_FIRST_S)

    def over(self, job: str, *, before: int | None = None) -> None:
        """The generations of `job` before this number are over; None = the job is."""
        for identifier in [
            identifier
            for identifier, held in self._held.items()
            if held.finding.job == job and (before is None or held.finding.generation < before)
        ]:
            del self._held[identifier]

    def stepped(self, record: StepRecord, now: float) -> None:
        """Every rank of a generation has finished a step: nobody is lost, gone or stuck. Hardware may still be broken."""
        if not self._held:
            return
        for identifier in [
            identifier
            for identifier, held in self._held.items()
            if (held.finding.job, held.finding.generation) == (record.job, record.generation)
            and held.finding.severity is not Severity.FATAL
            and now - held.finding.at > _REPORTS_LAG_S
        ]:
            del self._held[identifier]

    def due(self, now: float) -> tuple[Finding, ...]:
        """What is to be said again now. A clock that was set back makes nobody wait longer than a pause."""
        if now < self._next_at and (not self._held or self._next_at - now <= REPEAT_S_MAX):
            return ()
        repeats = []
        for held in self._held.values():
            if held.next_at - held.pause_s <= now < held.next_at:
                continue
            waited_s = max(0.0, now - held.finding.at)
            held.finding = replace(held.finding, repeat=held.finding.repeat + 1, waited_s=waited_s)
            held.pause_s = min(2 * held.pause_s, REPEAT_S_MAX)
            held.next_at = now + held.pause_s
            repeats.append(held.finding)
        self._next_at = min((held.next_at for held in self._held.values()), default=float("inf"))
        return tuple(repeats)
