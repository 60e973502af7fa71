"""Reads checkpoints in the object store again, slowly, to find corruption before a restore needs them.

Each object is read by one node: a rank's own objects by the node of that rank, tensors that replicas have in common by the
node of the first rank that names them. A shard that arrives corrupt at a restore is read again at once by the node that needs
it.

Corruption is reported. If this node still has the shard, it replaces the object. Otherwise it writes a damage marker: the
checkpoint is not listed as restorable until a later scrub finds it intact or repairs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import structlog

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import HoldfastError, NotFound
from holdfast.domain.generations import ShardKey
from holdfast.replicator.bucket import Bucket
from holdfast.replicator.engine import Engine
from holdfast.replicator.jobs import Job
from holdfast.replicator.names import label
from holdfast.replicator.store_sync import StoreSync
from holdfast.stores.transfer import Damage

log = structlog.get_logger("holdfast.replicator.scrub")


class StoreScrubber:
    """`interval_s`: seconds between two complete scrubs. `pace` is called with the number of bytes of each piece read."""

    def __init__(
        self, engine: Engine, store_sync: StoreSync, *, interval_s: float, pace: Callable[[int], None]
    ) -> None:
        self._engine = engine
        self._store_sync = store_sync
        self._interval_s = interval_s
        self._pace = pace

    async def run(self) -> None:
        """Never returns."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._look_at_suspects)
            while True:  # the store verifies uploads, so the first scrub is not urgent
                await anyio.sleep(self._interval_s)
                for job in list(self._engine.jobs.values()):
                    for checkpoint_id in sorted(job.archive.stored):
                        await self._check(job, *checkpoint_id)

    async def _look_at_suspects(self) -> None:
        while True:
            changed = self._engine.changed
            for job in list(self._engine.jobs.values()):
                while job.archive.suspects:
                    await self._examine(job, job.archive.suspects.pop())
            await changed.wait()

    async def _examine(self, job: Job, key: ShardKey) -> None:
        """Read the object again to find out whether it was corrupted in transfer or is corrupt in the store."""
        try:
            bucket = await self._store_sync.bucket(job)
            damage = await self._engine.threads.archive(bucket.examine, key)
        except HoldfastError as error:
            log.warning("download check failed", job=job.name, shard=label(key), reason=str(error))
            return
        if not damage:
            log.warning("download corrupted; stored object intact", job=job.name, shard=label(key))
            return
        await self._repair(job, bucket, key.checkpoint, damage)

    async def _check(self, job: Job, attempt: int, step: int) -> None:
        if job.gone or job.config is None or not job.config.store:
            return
        ranks = job.config.ranks
        try:
            bucket = await self._store_sync.bucket(job)
            damage = await self._engine.threads.archive(bucket.damage, attempt, step, ranks, self._pace)
        except NotFound:
            return  # the checkpoint has been deleted
        except HoldfastError as error:
            log.warning("object store scrub failed", job=job.name, step=step, attempt=attempt, reason=str(error))
            return
        broken = await self._repair(job, bucket, CheckpointId(attempt, step), damage)
        if job.archive.is_damaged(CheckpointId(attempt, step)):
            await self._store_sync.unmark(
                job, bucket, [ShardKey(attempt, step, rank) for rank in ranks if rank not in broken]
            )

    async def _repair(
        self, job: Job, bucket: Bucket, checkpoint_id: CheckpointId, damage: Sequence[Damage]
    ) -> set[int]:
        """Replace objects of which this node has an intact copy, and mark the others. Returns the ranks whose shard
        stays damaged."""
        broken: set[int] = set()
        for each in damage:
            log.error("corrupt object found in the object store", job=job.name, object=each.key, reason=each.problem)
            if not await self._repair_object(job, bucket, each, ShardKey(*checkpoint_id, each.rank)):
                broken.add(each.rank)
                await self._store_sync.mark(job, bucket, each, checkpoint_id)
        return broken

    async def _repair_object(self, job: Job, bucket: Bucket, damage: Damage, key: ShardKey) -> bool:
        reasons: list[str] = []
        for held in job.holders(key):
            try:
                shard = await self._engine.threads.urgent(self._engine.tiers[held.tier].open, job.name, key)
                await self._engine.threads.archive(bucket.repair_object, shard, damage.key, self._store_sync.pace)
            except (HoldfastError, OSError) as error:
                reasons.append(str(error))
            else:
                log.info("corrupt object replaced", job=job.name, object=damage.key)
                return True
        log.error(
            "corrupt object not repaired: no intact copy on this node",
            job=job.name,
            object=damage.key,
            reason="; ".join(reasons) or "this node no longer has the shard",
        )
        return False
