"""Counts missed saves in a row. One is normal if saves are frequent. Several mean that a rank has no recent checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.agent.troubles import REPEAT_S
from holdfast.domain.notes import MissedNote, Note, SavedNote

MISSES_MAX = 3


@dataclass(slots=True)
class _InARow:
    count: int = 0
    first_reported: float = 0.0  # Unix s
    last_reported: float = 0.0


@dataclass(frozen=True, slots=True)
class Missed:
    """A report about a rank. `since`: time of the first report, which does not change until the rank has saved again."""

    since: float
    reason: str


class Misses:
    """The missed saves of one generation's ranks on a node."""

    def __init__(self) -> None:
        self._in_a_row: dict[int, _InARow] = {}

    def fold(self, note: Note, at: float) -> Missed | None:
        """Process a note. Returns the report about its rank that is due now, or None. `at`: Unix seconds."""
        rank = note.sender.rank
        match note:
            case SavedNote():
                self._in_a_row.pop(rank, None)
            case MissedNote():
                missed = self._in_a_row.setdefault(rank, _InARow())
                missed.count += 1
                if missed.count == MISSES_MAX or (missed.count > MISSES_MAX and _again(missed.last_reported, at)):
                    missed.first_reported, missed.last_reported = missed.first_reported or at, at
                    reason = f"{missed.count} in a row, the last one of step {note.step}: {note.reason}"
                    return Missed(missed.first_reported, reason)
        return None


def _again(last: float, at: float) -> bool:
    return not 0.0 <= at - last < REPEAT_S
