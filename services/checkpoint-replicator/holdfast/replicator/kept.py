"""The time since a run of a job has ended, counted while the replicator runs. Values only; no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

SUBMISSIONS_MAX = 64  # ended runs; older runs expire together with the next one


@dataclass(slots=True)
class KeptSince:
    """`ages_s`: attempt → seconds since the attempts before it ended. Attempts before `expired_before` are older than
    the retention period. Runs are separated by attempts because attempts grow from run to run."""

    ages_s: dict[int, float] = field(default_factory=dict)
    expired_before: int = 0

    def submitted(self, first_attempt: int) -> None:
        """Record that a run begins with this attempt. Older attempts belong to earlier runs. 0 = unknown."""
        self._add(first_attempt)

    def ended(self, attempt: int) -> None:
        """Record the end of the run whose last attempt is `attempt`."""
        self._add(attempt + 1)

    def grow_older(self, seconds: float, retention_s: float) -> None:
        """Add `seconds` to all ages. `retention_s` 0 = unlimited."""
        self.ages_s = {boundary: age_s + seconds for boundary, age_s in self.ages_s.items()}
        expired = [boundary for boundary, age_s in self.ages_s.items() if retention_s and age_s >= retention_s]
        self.expired_before = max([self.expired_before, *expired])
        self.ages_s = {boundary: age_s for boundary, age_s in self.ages_s.items() if boundary >= self.expired_before}

    def _add(self, boundary: int) -> None:
        if boundary > self.expired_before:
            self.ages_s.setdefault(boundary, 0.0)
        for oldest in sorted(self.ages_s)[:-SUBMISSIONS_MAX]:
            del self.ages_s[oldest]
