"""The shards of a simulated node: in memory, lost with the machine, and on disk. Copies can be corrupt."""

from __future__ import annotations

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import ShardKey, ShardRecord
from holdfast.domain.orders import Prepare

STEPS_KEPT = 3

Held = dict[ShardKey, ShardRecord]


class Shards:
    def __init__(self, node: str) -> None:
        self._node = node
        self.memory: dict[str, Held] = {}  # by job
        self.disk: dict[str, Held] = {}
        self.rotten: set[ShardKey] = set()  # corrupt copies

    def boot(self) -> None:
        """Load the contents of the disk into memory."""
        for job, shards in self.disk.items():
            self.memory[job] = shards | self.memory.get(job, {})

    def is_copying(self, job: str) -> bool:
        """Whether the newest save of this node is not on its disk yet."""
        own = [key for key, shard in self.memory.get(job, {}).items() if shard.owner == self._node]
        newest = max(((key.attempt, key.step) for key in own), default=None)
        disk = self.disk.get(job, {})
        return any((key.attempt, key.step) == newest and key not in disk for key in own)

    def listing(self, job: str) -> tuple[ShardRecord, ...]:
        held = self.memory.get(job, {})
        return tuple(held[key] for key in sorted(held, key=lambda key: (key.attempt, key.step, key.rank)))

    def is_rotten(self, job: str, key: ShardKey) -> bool:
        """Read a copy. A corrupt one is deleted."""
        if key not in self.rotten:
            return False
        self.rotten.discard(key)
        for shards in (self.memory, self.disk):
            shards.get(job, {}).pop(key, None)
        return True

    def save(self, order: Prepare, step: int, *, sharded: bool) -> None:
        """Write the shard of each rank to memory."""
        held = self.memory.setdefault(order.job, {})
        for rank in order.placement.ranks:
            key = ShardKey(order.attempt, step, rank)
            share = rank if sharded else order.mesh.position_of(rank)
            held[key] = ShardRecord(key, order.mesh, "memory", 1, f"{step}/{share}", self._node, f"{step}.{rank}")
        self._expire(order.job)

    def copy_to_disk(self, order: Prepare, step: int) -> Held:
        """Copy this node's own shards of a step, and return them."""
        held = self.memory.get(order.job, {}).items()
        own = {k: s for k, s in held if (k.attempt, k.step, s.owner) == (order.attempt, step, self._node)}
        self.disk[order.job] = self.disk.get(order.job, {}) | own
        return own

    def take(self, job: str, shards: Held) -> None:
        """Store copies in memory and on disk."""
        for tier in (self.memory, self.disk):
            tier[job] = tier.get(job, {}) | shards
        self._expire(job)

    def put(self, job: str, record: ShardRecord, key: ShardKey) -> None:
        for tier in (self.memory, self.disk):
            tier.setdefault(job, {})[key] = record

    def prune(self, job: str, steps: tuple[CheckpointId, ...]) -> None:
        for shards in (self.memory.get(job, {}), self.disk.get(job, {})):
            for key in [key for key in shards if (key.attempt, key.step) in steps]:
                del shards[key]

    def forget(self, job: str) -> None:
        self.memory.pop(job, None)
        self.disk.pop(job, None)

    def _expire(self, job: str) -> None:
        for shards in (self.memory.get(job, {}), self.disk.get(job, {})):
            steps: dict[tuple[int, str], list[tuple[int, int]]] = {}
            for key, record in shards.items():
                steps.setdefault((key.rank, record.owner), []).append((key.attempt, key.step))
            for (rank, _), ages in steps.items():
                for attempt, step in sorted(ages)[:-STEPS_KEPT]:
                    del shards[ShardKey(attempt, step, rank)]
