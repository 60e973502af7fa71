"""Missed saves in a row: one is normal when saves are frequent, several mean that a rank has no checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.agent.troubles import REPEAT_S
from holdfast.domain.notes import MissedNote, Note, SavedNote

MISSES_MAX = 3


@dataclass(slots=True)
class _InARow:
    count: int = 0
    told_first: float = 0.0  # Unix s
    told_last: float = 0.0


@dataclass(frozen=True, slots=True)
class Missed:
    """What is to be told of a rank. `since`: when it was told first, the same until the rank has saved again."""

    since: float
    reason: str


class Misses:
    """Of one generation's ranks on a node."""

    def __init__(self) -> None:
        self._in_a_row: dict[int, _InARow] = {}

    def fold(self, note: Note, at: float) -> Missed | None:
        """What is to be told of the note's rank now, if anything. `at`: Unix seconds."""
        rank = note.sender.rank
        match note:
            case SavedNote():
                self._in_a_row.pop(rank, None)
            case MissedNote():
                missed = self._in_a_row.setdefault(rank, _InARow())
                missed.count += 1
                if missed.count == MISSES_MAX or (missed.count > MISSES_MAX and _again(missed.told_last, at)):
                    missed.told_first, missed.told_last = missed.told_first or at, at
                    reason = f"{missed.count} in a row, the last one of step {note.step}: {note.reason}"
                    return Missed(missed.told_first, reason)
        return None


def _again(last: float, at: float) -> bool:
    return not 0.0 <= at - last < REPEAT_S
