"""The simulated object store: stores shards late, completes a checkpoint with its last shard, and is unavailable at times."""

from __future__ import annotations

from holdfast.domain.generations import ShardKey, ShardRecord, StoredStep
from holdfast.sim.world import World

URL = "gs://simulated/store"
LATE_S = (0.3, 5.0)
RETRY_S = (1.0, 3.0)
LISTED_MAX = 4


class Store:
    def __init__(self, world: World) -> None:
        self.world = world
        self.away = False
        self.complete: dict[tuple[int, int], StoredStep] = {}
        self._shards: dict[ShardKey, ShardRecord] = {}

    def takes(self, step: int) -> bool:
        """Whether a checkpoint is uploaded; about every other one. All ranks decide alike without communication."""
        return step % 3 != 0

    def put(self, record: ShardRecord) -> bool:
        """Store a shard, after a delay. Returns False if the store is unavailable."""
        if self.away:
            return False
        self._shards[record.key] = record
        attempt, step = record.key.attempt, record.key.step
        ranks = [self._shards.get(ShardKey(attempt, step, rank)) for rank in range(record.mesh.world_size)]
        if all(ranks) and (attempt, step) not in self.complete:
            by_position: dict[int, set[str]] = {}
            for found in ranks:
                assert found is not None
                by_position.setdefault(found.mesh.position_of(found.key.rank), set()).add(found.digest)
            sharded = any(len(digests) > 1 for digests in by_position.values())
            self.complete[attempt, step] = StoredStep(attempt, step, record.mesh, sharded)
            self.world.say(f"the object store has step {step} of attempt {attempt}")
        return True

    def get(self, key: ShardKey) -> ShardRecord | None:
        return None if self.away else self._shards.get(key)

    def listing(self) -> tuple[StoredStep, ...]:
        return (
            () if self.away else tuple(self.complete[key] for key in sorted(self.complete, reverse=True)[:LISTED_MAX])
        )
