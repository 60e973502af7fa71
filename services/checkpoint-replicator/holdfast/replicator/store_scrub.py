"""Checkpoints in the object store are read again, slowly: one that rots unseen would be missed only when it is the last one.

Each object is read by one node: a rank's own share by the node of that rank, tensors that replicas share by the node of the
first rank that names them. What is damaged is reported, and written anew where this node still has the shard.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import structlog

from holdfast.domain.errors import HoldfastError, NotFound
from holdfast.domain.generations import ShardKey
from holdfast.replicator.archivist import Archivist
from holdfast.replicator.bucket import Bucket
from holdfast.replicator.engine import Engine
from holdfast.replicator.jobs import Job
from holdfast.stores.transfer import Damage

log = structlog.get_logger("holdfast.replicator.scrub")


class StoreScrubber:
    """`interval_s`: between two looks at everything; `pace` is called with the bytes of each piece that has been read."""

    def __init__(self, engine: Engine, archivist: Archivist, *, interval_s: float, pace: Callable[[int], None]) -> None:
        self._engine = engine
        self._archivist = archivist
        self._interval_s = interval_s
        self._pace = pace

    async def run(self) -> None:
        """Runs for ever. What goes up is verified by the store itself, so the first look has time."""
        while True:
            await anyio.sleep(self._interval_s)
            for job in list(self._engine.jobs.values()):
                for age in sorted(job.archive.stored):
                    await self._check(job, *age)

    async def _check(self, job: Job, attempt: int, step: int) -> None:
        if job.gone or job.config is None or not job.config.store:
            return
        try:
            bucket = await self._archivist.bucket(job)
            damage = await self._engine.threads.archive(bucket.damage, attempt, step, job.config.ranks, self._pace)
        except NotFound:
            return  # it has left the store
        except HoldfastError as error:
            log.warning("not verified", job=job.name, step=step, attempt=attempt, reason=str(error))
            return
        for each in damage:
            log.error("corrupt object in the object store", job=job.name, object=each.key, reason=each.problem)
            await self._mend(job, bucket, each, ShardKey(attempt, step, each.rank))

    async def _mend(self, job: Job, bucket: Bucket, damage: Damage, key: ShardKey) -> None:
        reasons: list[str] = []
        for held in job.holders(key):
            try:
                shard = await self._engine.threads.urgent(self._engine.tiers[held.store].open, job.name, key)
                await self._engine.threads.archive(bucket.mend, shard, damage.key, self._archivist.pace)
            except (HoldfastError, OSError) as error:
                reasons.append(str(error))
            else:
                log.info("replaced in the object store", job=job.name, object=damage.key)
                return
        log.error(
            "no good copy for the object store: this step will not be restored from it",
            job=job.name,
            object=damage.key,
            reason="; ".join(reasons) or "this node does not hold the shard any more",
        )
