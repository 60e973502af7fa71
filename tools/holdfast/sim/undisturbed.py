"""What the promises about copies (`durability`) need to know of one replicator."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from math import inf

from holdfast.domain.generations import ShardKey
from holdfast.replicator.view import Held, Tier
from holdfast.sim.world import Violation

SAVES_MAX = 64  # of a rank, the newest


@dataclass(slots=True)
class Undisturbed:
    """What one replicator was given to copy, and since when nothing hinders it."""

    since: float = -inf
    reached_since: float = -inf  # its peers: no message has been lost
    saves: dict[tuple[str, int], deque[tuple[float, ShardKey]]] = field(default_factory=dict)  # by job and rank

    def saved(self, job: str, key: ShardKey, now: float) -> None:
        self.saves.setdefault((job, key.rank), deque(maxlen=SAVES_MAX)).append((now, key))

    def due(self, job: str, attempt: int, rank: int, since: float, until: float) -> ShardKey | None:
        """Return the newest save between these times."""
        found = (key for at, key in self.saves.get((job, rank), ()) if since < at <= until and key.attempt == attempt)
        return max(found, key=lambda key: key.step, default=None)


def is_on_disk(peer: str, files: Collection[Held], key: ShardKey) -> None:
    """Called when a replicator takes a shard for being on the disk of `peer`, which has `files`. Raises Violation."""
    if Held(Tier.DISK, key) not in files:
        raise Violation(f"{key} is taken for being on the disk of {peer}, which does not have it there")
