"""Missed saves in a row: one is normal when saves are frequent, several mean that a rank has no checkpoints."""

from __future__ import annotations

from holdfast.domain.notes import MissedNote, Note, SavedNote

MISSES_MAX = 3


class Misses:
    """Of one generation's ranks on a node."""

    def __init__(self) -> None:
        self._in_a_row: dict[int, int] = {}

    def fold(self, note: Note) -> str:
        """What is to be told of the note's rank: once, until it has saved again; else ""."""
        rank = note.sender.rank
        match note:
            case SavedNote():
                self._in_a_row.pop(rank, None)
            case MissedNote():
                self._in_a_row[rank] = missed = self._in_a_row.get(rank, 0) + 1
                if missed == MISSES_MAX:
                    return f"{missed} in a row, the last one of step {note.step}: {note.reason}"
        return ""
