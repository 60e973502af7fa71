"""Object store operations for the mover and the stager: opens the job's bucket, calls it in separate threads, records the
results."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

import anyio
import structlog

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import Conflict, HoldfastError, IntegrityError, NotFound
from holdfast.domain.generations import RankRestore, ShardKey, ShardSource
from holdfast.replicator.archive import TOLD_EXTRA
from holdfast.replicator.bucket import Bucket
from holdfast.replicator.engine import Engine
from holdfast.replicator.jobs import Job
from holdfast.replicator.names import label
from holdfast.replicator.sharing import Arrivals, Sharers
from holdfast.replicator.threads import Pace
from holdfast.replicator.tiers import OpenShard
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.transport.client import Client
from holdfast.replicator.view import Complete, Discard, Survey
from holdfast.replicator.wanted import Wanted
from holdfast.runtime import freeze
from holdfast.shards import Manifest
from holdfast.stores import ObjectStore, open_store
from holdfast.stores.transfer import Damage

# Limit for another replica's upload of the same tensors, after which this node uploads them. If the replica has failed,
# the checkpoint stays incomplete anyway, so this is for sharded state that is not yet known to be sharded.
REPLICA_GRACE_S = 20.0
REPLICA_GRACE_BYTES_PER_S = 100e6
REPLICA_POLL_S = 0.5

log = structlog.get_logger("holdfast.replicator")


class NotYet(NotFound):
    """Shards of other ranks are not uploaded yet; retry later."""


class OpenStores:
    """The object stores in use, each opened once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stores: dict[str, ObjectStore] = {}

    def __getitem__(self, url: str) -> ObjectStore:
        """Return the store at a URL. Raises InvalidSpec for an unsupported URL."""
        with self._lock:
            if url not in self._stores:
                self._stores[url] = open_store(url)
            return self._stores[url]

    def close(self) -> None:
        with self._lock:
            for store in self._stores.values():
                store.close()


@dataclass(frozen=True, slots=True)
class StoreSync:
    """`pace` is called with the number of bytes of each piece before its upload. `node` is this node's name. Other nodes read
    this node's downloads from `arrivals`."""

    engine: Engine
    stores: OpenStores
    pace: Pace
    client: Client
    node: str
    arrivals: Arrivals
    _locks: WeakValueDictionary[str, anyio.Lock] = field(default_factory=WeakValueDictionary)

    # ------------------------------------------------------------ up

    async def wait_for_replica(self, job: Job, key: ShardKey) -> None:
        """Wait until this shard's tensors are in the store or this node is to upload them."""
        held = next(iter(job.holders(key)), None)
        if held is None or job.archive.newest_is_sharded:
            return
        manifest = job.held[held]
        bucket = await self.bucket(job)
        with freeze.patience(REPLICA_GRACE_S + manifest.size / REPLICA_GRACE_BYTES_PER_S):
            while await self.engine.threads.archive(bucket.another_uploads, manifest):  # noqa: ASYNC110 - of another node
                await anyio.sleep(REPLICA_POLL_S)

    async def upload(self, job: Job, shard: OpenShard) -> None:
        """Upload a shard and close it."""

        def upload() -> None:
            with shard:
                bucket.upload(shard, self.pace)

        bucket = await self.bucket(job)
        await self.engine.threads.archive(upload)
        log.info("shard stored", job=job.name, shard=label(shard.manifest.key), store=bucket.store.url)

    async def carry_out(self, job: Job, step: Survey | Complete | Discard) -> None:
        bucket = await self.bucket(job)
        match step:
            case Survey():
                await self._survey(job, bucket)
            case Complete(ages):
                await self._complete(job, bucket, ages)
            case Discard(checkpoint_id):
                await self.engine.threads.archive(bucket.discard, *checkpoint_id)
                job.archive.discarded(checkpoint_id)
                log.info(
                    "checkpoint deleted from the object store",
                    job=job.name,
                    step=checkpoint_id.step,
                    attempt=checkpoint_id.attempt,
                    reason=step.reason,
                )

    async def _survey(self, job: Job, bucket: Bucket) -> None:
        newest = (job.config.store_keep if job.config else 0) + TOLD_EXTRA
        known = tuple(job.archive.stored.values())
        job.archive.found(await self.engine.threads.archive(bucket.survey, known, newest))

    async def _complete(self, job: Job, bucket: Bucket, ages: tuple[CheckpointId, ...]) -> None:
        config = job.config
        if config is None:
            return
        for checkpoint_id in ages:
            checkpoint = await self.engine.threads.archive(bucket.complete, *checkpoint_id, config.mesh.world_size)
            if checkpoint is not None:
                job.archive.completed(checkpoint.stored_step, owner=0 in config.ranks)
                log.info(
                    "checkpoint complete in the object store",
                    job=job.name,
                    step=checkpoint_id.step,
                    attempt=checkpoint_id.attempt,
                )
                return  # the newest comes first; older ones are superseded
        raise NotYet(f"not every rank's shard is in {bucket.store.url} yet")

    # ------------------------------------------------------------ down

    async def retrieve(self, job: Job, restore: RankRestore, source: ShardSource, into: FileTier) -> Path:
        """Download a shard from the object store, verify it and commit it in `into`.

        Tensors that several local ranks have in common are downloaded once. Tensors that other nodes need as well are shared
        with them.
        """
        threads = self.engine.threads
        bucket = Bucket(await threads.retrieval(self.stores.__getitem__, source.endpoint), source.job or job.name)
        try:
            return await self._retrieve(job, restore, source, into, bucket)
        except (IntegrityError, NotFound):
            if (bucket.job, source.endpoint) == (job.name, job.config.store if job.config else ""):
                job.archive.suspect(restore.shard)  # the scrubber checks it later; this restore tries other sources
                self.engine.notify()
            raise

    async def _retrieve(
        self, job: Job, restore: RankRestore, source: ShardSource, into: FileTier, bucket: Bucket
    ) -> Path:
        threads = self.engine.threads
        manifest = await threads.retrieval(bucket.manifest_of, Wanted.of(restore), job.name)
        lock = self._locks.setdefault(f"{source.endpoint} {job.name} {manifest.digest}", anyio.Lock())
        async with lock:
            donor = await self._donor(job, manifest)
            sharing = self._sharing(job, restore, manifest)
            cancelled = threading.Event()

            def fetch() -> Path:
                with donor or nullcontext():
                    return bucket.fetch(manifest, into, donor, sharing, job.name, cancelled)

            return await threads.retrieval(fetch, cancelled=cancelled)

    # ------------------------------------------------------------ damage

    async def mark(self, job: Job, bucket: Bucket, damage: Damage, checkpoint_id: CheckpointId) -> None:
        """Mark a checkpoint as damaged, in the store and in the inventory, so that it is not restored from there."""
        try:
            if not await self.engine.threads.archive(bucket.mark, damage, *checkpoint_id):
                return  # the checkpoint has been deleted
        except HoldfastError as error:  # the inventory still marks it
            log.warning("damage marker not written", job=job.name, reason=str(error))
        job.archive.found_damaged(checkpoint_id, damage.problem)
        self.engine.notify()

    async def unmark(self, job: Job, bucket: Bucket, keys: Sequence[ShardKey]) -> None:
        """Delete the damage markers of these shards, which have been found intact."""
        for key in keys:
            try:
                unmarked = await self.engine.threads.archive(bucket.unmark, key)
            except HoldfastError as error:
                log.warning("damage marker not removed", job=job.name, reason=str(error))
                continue
            if unmarked:
                log.info("damage marker removed", job=job.name, shard=label(key))
                job.archive.surveyed = False
                self.engine.notify()

    def _sharing(self, job: Job, restore: RankRestore, manifest: Manifest) -> tuple[Sharers, Arrivals] | None:
        if all(node.node != self.node for node in restore.sharing):
            return None
        name, token, client = job.name, job.token, self.client

        def read(node: ShardSource, offset: int, target: memoryview) -> None:
            client.read_piece(node, name, token, manifest.digest, offset, target)

        return Sharers(restore.sharing, self.node, read), self.arrivals

    async def _donor(self, job: Job, manifest: Manifest) -> OpenShard | None:
        """Open a local shard with the same tensors. Bytes read from it are verified like downloaded ones."""
        for held, candidate in list(job.held.items()):
            if (candidate.digest, candidate.tensors_end) != (manifest.digest, manifest.tensors_end):
                continue
            try:
                return await self.engine.threads.urgent(self.engine.tiers[held.tier].open, job.name, held.key)
            except (HoldfastError, OSError) as error:
                log.debug("local donor rejected", shard=label(held.key), reason=str(error))
        return None

    async def bucket(self, job: Job) -> Bucket:
        if job.config is None or not job.config.store:
            raise Conflict(f"job {job.name} has no object store")
        return Bucket(await self.engine.threads.archive(self.stores.__getitem__, job.config.store), job.name)
