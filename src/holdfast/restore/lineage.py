"""The lineage of a job's checkpoints: the attempts that lead to the current state, each with the last step that counts.

The supervisor records the lineage at the start of each generation (`branch`). Without services, it is computed from the shards,
each of which contains the (attempt, step) from which its attempt was forked (`ancestry`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import RestorePoint


@dataclass(frozen=True, slots=True)
class Segment:
    """One attempt of the lineage. Steps after `until` were abandoned when the next attempt branched off; None = all count."""

    attempt: int
    until: int | None = None


class Line:
    """The lineage, prepared for frequent lookups."""

    def __init__(self, lineage: Iterable[Segment]) -> None:
        self._until = {segment.attempt: segment.until for segment in lineage}

    def holds(self, attempt: int, step: int) -> bool:
        """Whether a step that was saved by `attempt` is on the lineage."""
        if step <= 0 or attempt not in self._until:
            return False
        last = self._until[attempt]
        return last is None or step <= last


def branch(lineage: Sequence[Segment], attempt: int, restore: RestorePoint, length_max: int) -> tuple[Segment, ...]:
    """Return the lineage after `attempt` has started from `restore`. Abandoned steps can never be selected again."""
    if restore.step == 0:
        return (Segment(attempt),)
    rest = [segment for segment in lineage if segment.attempt <= restore.attempt]
    cut = [Segment(s.attempt, restore.step if s.attempt == restore.attempt else s.until) for s in rest]
    return (Segment(attempt), *cut)[:length_max]


def ancestry(parents: Mapping[int, CheckpointId | None]) -> tuple[Segment, ...]:
    """Return the lineage of the newest attempt. `parents`: attempt → the (attempt, step) from which it was forked, None = from
    step 0.

    An attempt that is known only as a parent ends the chain, with its steps up to the fork.
    """
    attempt, until = max(parents, default=0), None
    chain: list[Segment] = []
    while attempt > 0:
        chain.append(Segment(attempt, until))
        parent = parents.get(attempt)
        if parent is None or parent.attempt >= attempt:  # the root, or an invalid shard
            break
        attempt, until = parent
    return tuple(chain)
