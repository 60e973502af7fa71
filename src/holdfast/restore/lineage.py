"""The lineage of a job's checkpoints: which attempts led to where it is, and up to which step each of them counts.

The supervisor records it whenever a generation starts (`branch`); without services it follows from the shards, each of which
names the (attempt, step) that its attempt was forked from (`ancestry`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import RestorePoint


@dataclass(frozen=True, slots=True)
class Segment:
    """One attempt of the lineage. Steps after `until` were given up when the next attempt branched off; None = all count."""

    attempt: int
    until: int | None = None


class Line:
    """The lineage, to be asked often."""

    def __init__(self, lineage: Iterable[Segment]) -> None:
        self._until = {segment.attempt: segment.until for segment in lineage}

    def holds(self, attempt: int, step: int) -> bool:
        """Whether a step that was saved by `attempt` has not been given up."""
        if step <= 0 or attempt not in self._until:
            return False
        last = self._until[attempt]
        return last is None or step <= last


def branch(lineage: Sequence[Segment], attempt: int, restore: RestorePoint, length_max: int) -> tuple[Segment, ...]:
    """The lineage after `attempt` has started from `restore`: what was given up can never be elected again."""
    if restore.step == 0:
        return (Segment(attempt),)
    rest = [segment for segment in lineage if segment.attempt <= restore.attempt]
    cut = [Segment(s.attempt, restore.step if s.attempt == restore.attempt else s.until) for s in rest]
    return (Segment(attempt), *cut)[:length_max]


def ancestry(parents: Mapping[int, CheckpointId | None]) -> tuple[Segment, ...]:
    """The lineage of the newest attempt. `parents`: attempt → the (attempt, step) that it was forked from, None = from step 0.

    An attempt of which only a fork is known ends the chain, up to that fork.
    """
    attempt, until = max(parents, default=0), None
    chain: list[Segment] = []
    while attempt > 0:
        chain.append(Segment(attempt, until))
        parent = parents.get(attempt)
        if parent is None or parent.attempt >= attempt:  # the root, or a shard that cannot be right
            break
        attempt, until = parent
    return tuple(chain)
