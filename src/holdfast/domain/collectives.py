"""Snapshots of ranks that make no progress: their processes, and the collectives that they have entered.

Collectives are stored as rows instead of objects: a job of 100,000 ranks has a million of them, and they are read once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain

RANKS_MAX = 1_000_000  # of one process group
MEMBERS_MAX = 2_000_000  # of all process groups of one report together
_RUN = re.compile(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?")


@dataclass(frozen=True, slots=True)
class CollectiveRows:
    """Columns with one row for each (rank, process group), and one for each (rank, group, direction, peer) of point-to-point
    operations that are not finished. `group` and `members` together identify a group, because names are unique only among
    groups that all ranks created together. Sequence numbers count the collectives of a group from its creation, equally on all
    members.
    """

    rank: tuple[int, ...]
    group: tuple[str, ...]
    members: tuple[str, ...]  # `compact` of the global ranks; "" = not known
    kind: tuple[str, ...]  # of the oldest unfinished operation: "all_reduce", "send"; "" = all operations are finished
    sizes: tuple[str, ...]  # sizes of its tensors, as a text that is equal if the sizes are equal
    peer: tuple[int, ...]  # global rank at the other end of a point-to-point operation; -1 = a collective
    entered: tuple[int, ...]  # newest collective that the rank has entered; -1 = not known
    pending: tuple[int, ...]  # oldest operation that the rank has entered and not finished; -1 = none

    @classmethod
    def of(cls, parts: Iterable[CollectiveRows]) -> CollectiveRows:
        """Concatenate the rows of all parts."""
        listed = tuple(parts)
        columns = (chain.from_iterable(getattr(part, each.name) for part in listed) for each in fields(cls))
        return cls(*map(tuple, columns))


@dataclass(frozen=True, slots=True)
class StallSnapshot:
    """Ranks of a node that have reported nothing for some time. Columns with one entry per rank, and the rows of their flight
    recorders."""

    node: str
    at: float
    job: str
    generation: int
    rank: tuple[int, ...]
    # The flight recorder answered. It answers while the interpreter's lock is held, but not while the process is stopped.
    answered: tuple[bool, ...]
    interpreter: tuple[str, ...]  # the interpreter's lock: "free", "held" by one thread, "" = not known
    kernel: tuple[str, ...]  # kernel function in which the main thread waits (/proc/PID/wchan); "" = not known
    messages: tuple[bool, ...]  # the recorder shows point-to-point operations: NCCL's does, gloo's does not
    stack: tuple[str, ...]  # innermost frame first, one per line; "" = no sample
    rows: CollectiveRows


def compact(ranks: Sequence[int]) -> str:
    """Encode ranks, in their order, as arithmetic sequences: (0, 1, 2, 3) is "0-3", (0, 8, 16) is "0-16:8"."""
    runs: list[str] = []
    start = 0
    while start < len(ranks):
        end, stride = start + 1, 0
        if end < len(ranks) and ranks[end] > ranks[start]:
            stride = ranks[end] - ranks[start]
            while end < len(ranks) and ranks[end] - ranks[end - 1] == stride:
                end += 1
        first, last = ranks[start], ranks[end - 1]
        if end - start == 1:
            runs.append(f"{first}")
        elif stride == 1:
            runs.append(f"{first}-{last}")
        else:
            runs.append(f"{first}-{last}:{stride}")
        start = end
    return ",".join(runs)


def expand(text: str) -> tuple[int, ...]:
    """Decode the text of `compact`. Raises ValueError if it is malformed or has more than `RANKS_MAX` ranks."""
    return tuple(chain.from_iterable(_runs(text)))


def count(text: str) -> int:
    """Count the ranks in a text of `compact`, without listing them. Raises as `expand` does."""
    return sum(map(len, _runs(text)))


def check_members(texts: Iterable[str]) -> None:
    """Check texts of `compact` before detectors expand them. Raises ValueError as `expand` does, and for more than
    `MEMBERS_MAX` ranks in all, which would take a detector too long."""
    total = 0
    for text in texts:
        total += count(text)
        if total > MEMBERS_MAX:
            raise ValueError(f"more than {MEMBERS_MAX} ranks in all groups")


def _runs(text: str) -> Sequence[range]:
    runs: list[range] = []
    total = 0
    for run in text.split(",") if text else ():
        found = _RUN.fullmatch(run)
        if found is None:
            raise ValueError(f"{run[:40]!r} is not a sequence of ranks (first-last:stride)")
        first = int(found[1])
        runs.append(range(first, int(found[2] or first) + 1, int(found[3] or 1) or 1))
        total += len(runs[-1])
        if total > RANKS_MAX:
            raise ValueError(f"more than {RANKS_MAX} ranks")
    return runs
