"""Which of the replicator's problems are to be passed on to diagnostics: each when it is new, and what lasts again and again.

The supervisor asks the policy about a warning that lasts, which a second report ten minutes later shows. What concerns a single
file is over with its first report.
"""

from __future__ import annotations

from typing import Final

from holdfast.domain.replication import Trouble, TroubleKind

REPEAT_S: Final = 300.0  # less than half of what diagnostics repeats after
_OF_FILES: Final = (TroubleKind.SET_ASIDE, TroubleKind.LEFT_ALONE)


class TroubleReports:
    """By job: the problems that were there last, with the time when each was passed on."""

    def __init__(self) -> None:
        self._passed_on: dict[str, dict[Trouble, float]] = {}

    def due(self, job: str, troubles: tuple[Trouble, ...], now: float) -> list[Trouble]:
        """`troubles`: all that the job has now. `now`: any clock that only grows, seconds."""
        known = self._passed_on.pop(job, {})
        due = [each for each in troubles if _is_due(each, known, now)]
        if troubles:
            self._passed_on[job] = {each: now if each in due else known[each] for each in troubles}
        return due


def _is_due(trouble: Trouble, known: dict[Trouble, float], now: float) -> bool:
    return trouble not in known or (trouble.kind not in _OF_FILES and now - known[trouble] >= REPEAT_S)
