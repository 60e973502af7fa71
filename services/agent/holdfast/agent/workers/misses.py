"""Counts missed saves in a row. One is normal if saves are frequent. Several mean that a rank has no recent checkpoint.

A rank can also miss saves without noticing: a script that calls `run.checkpoint` on rank 0 only, as is usual with `torch.save`,
has no checkpoint at all, because one needs the shards of all ranks. Without a report it would be found at the first restart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.agent.troubles import REPEAT_S
from holdfast.domain.notes import MissedNote, Note, SavedNote
from holdfast.domain.words import plural

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
        self._saved: dict[int, int] = {}  # rank → the newest step that it has saved
        self._steps: deque[int] = deque(maxlen=MISSES_MAX)  # the newest steps that some rank has saved
        self._without = _InARow()  # reports about ranks that do not save

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

    def without(self, note: SavedNote, finished: Mapping[int, int], at: float) -> tuple[int, Missed] | None:
        """Process a save. `finished`: the newest step that each rank of this node has finished.

        Returns the first rank that has saved none of the steps that others have saved lately, with the report that is due, or
        None. A rank that has not passed them yet may still save them, and one that reports its misses is not counted."""
        self._saved[note.sender.rank] = note.step
        if note.step not in self._steps:
            self._steps.append(note.step)
        if len(self._steps) < MISSES_MAX:
            return None
        oldest, passed = self._steps[0], self._steps[-2]  # the note of the newest step may still be on its way
        ranks = [
            rank
            for rank, step in sorted(finished.items())
            if step >= passed and self._saved.get(rank, -1) < oldest and rank not in self._in_a_row
        ]
        if not ranks:
            self._without = _InARow()
            return None
        if self._without.first_reported and not _again(self._without.last_reported, at):
            return None
        self._without.first_reported, self._without.last_reported = self._without.first_reported or at, at
        others = f" and {plural(len(ranks) - 1, 'other rank')} of the node" if len(ranks) > 1 else ""
        saved = ", ".join(map(str, self._steps))
        reason = (
            f"rank {note.sender.rank} has saved the steps {saved}, and rank {ranks[0]}{others} none of them: every rank must "
            "call run.checkpoint, and without the shards of all ranks nothing can be restored"
        )
        return ranks[0], Missed(self._without.first_reported, reason)


def _again(last: float, at: float) -> bool:
    return not 0.0 <= at - last < REPEAT_S
