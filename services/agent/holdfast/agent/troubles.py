"""Selects the replicator's problems to report to diagnostics: each new problem, and lasting problems repeatedly.

A second report after ten minutes shows the supervisor that a warning lasts; it then asks the policy. A problem of a single file
is reported once.
"""

from __future__ import annotations

from typing import Final

from holdfast.domain.replication import Trouble, TroubleKind

REPEAT_S: Final = 300.0  # less than half of the time after which diagnostics repeats a finding
_OF_FILES: Final = (TroubleKind.SET_ASIDE, TroubleKind.LEFT_ALONE)


class TroubleReports:
    """The current problems of each job, with the time of the last report of each."""

    def __init__(self) -> None:
        self._reported: dict[str, dict[Trouble, float]] = {}

    def due(self, job: str, troubles: tuple[Trouble, ...], now: float) -> list[Trouble]:
        """Return the problems to report now. `troubles`: all current problems of the job. `now`: monotonic seconds."""
        known = self._reported.pop(job, {})
        due = [each for each in troubles if _is_due(each, known, now)]
        if troubles:
            self._reported[job] = {each: now if each in due else known[each] for each in troubles}
        return due


def _is_due(trouble: Trouble, known: dict[Trouble, float], now: float) -> bool:
    return trouble not in known or (trouble.kind not in _OF_FILES and now - known[trouble] >= REPEAT_S)
