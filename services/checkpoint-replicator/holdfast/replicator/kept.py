"""The time since a run of a job has ended, counted while the replicator runs. Values only; no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

SUBMISSIONS_MAX = 64  # that ended one after the other; the oldest are counted with the one that followed them


@dataclass(slots=True)
class KeptSince:
    """`ages_s`: what attempts before the key saved was left so many seconds ago. What is older than the retention is
    `expired_before` it. A boundary is an attempt because attempts grow from submission to submission."""

    ages_s: dict[int, float] = field(default_factory=dict)
    expired_before: int = 0

    def submitted(self, first_attempt: int) -> None:
        """A submission begins with this attempt: all that is older belongs to others. 0 = not told."""
        self._add(first_attempt)

    def ended(self, attempt: int) -> None:
        """The submission that has come as far as this attempt is over."""
        self._add(attempt + 1)

    def grow_older(self, seconds: float, retention_s: float) -> None:
        """`retention_s` 0 = nothing ever expires."""
        self.ages_s = {boundary: age_s + seconds for boundary, age_s in self.ages_s.items()}
        expired = [boundary for boundary, age_s in self.ages_s.items() if retention_s and age_s >= retention_s]
        self.expired_before = max([self.expired_before, *expired])
        self.ages_s = {boundary: age_s for boundary, age_s in self.ages_s.items() if boundary >= self.expired_before}

    def _add(self, boundary: int) -> None:
        if boundary > self.expired_before:
            self.ages_s.setdefault(boundary, 0.0)
        for oldest in sorted(self.ages_s)[:-SUBMISSIONS_MAX]:
            del self.ages_s[oldest]
