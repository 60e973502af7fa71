"""Staging: fetches and verifies the shards that this node's ranks restore, and returns their paths.

No shard is returned unverified. A local copy is checksummed in full under its lock (0.1 s per GB), because a worker with
memory corruption may have overwritten its own image after the commit. A fetched copy is verified span by span before it is
written. The lock is kept until training has continued, so that the bytes do not change between check and use."""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import anyio
import structlog

from holdfast.domain import tracing
from holdfast.domain.errors import (
    Conflict,
    HoldfastError,
    IntegrityError,
    NotFound,
    OutOfSpace,
    Unavailable,
    Unrestorable,
)
from holdfast.domain.generations import OBJECT_STORE, RankRestore, ShardKey, ShardSource
from holdfast.domain.replication import Stage, StagedShard
from holdfast.replicator.checksum import Checksummer
from holdfast.replicator.engine import Engine
from holdfast.replicator.jobs import Job
from holdfast.replicator.names import label
from holdfast.replicator.sockets import of_one_transfer
from holdfast.replicator.store_sync import StoreSync
from holdfast.replicator.tiers import LocalTier, OpenShard
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.part import Arriving
from holdfast.replicator.transport.client import Away, Client
from holdfast.replicator.view import Held, Tier
from holdfast.replicator.wanted import Wanted
from holdfast.runtime import freeze
from holdfast.runtime.telling import telemetry

ARRIVING_POLL_S = 0.02
AWAY_S = 12.0  # longer than an agent waits before it reports that its replicator is unavailable

# No descriptor or memory left, a read-only file system: this node cannot restore any step, and the copies may be intact. ENOSPC
# is not in this set, because restoring an older step from this node's tiers needs no space.
_OF_THIS_NODE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EROFS})

log = structlog.get_logger("holdfast.replicator")


@dataclass(slots=True)
class _Found:
    held: Held
    shard: OpenShard
    source: str


@dataclass(slots=True)
class _Failures:
    """Every source that was tried for one shard, and why it failed."""

    reasons: list[str] = field(default_factory=list)
    of_this_node: bool = False

    def add(self, source: str, error: BaseException) -> None:
        self.reasons.append(f"{source}: {error}")
        cause: BaseException | None = error
        while cause is not None:
            self.of_this_node |= isinstance(cause, OSError) and cause.errno in _OF_THIS_NODE
            cause = cause.__cause__


class Stager:
    def __init__(
        self,
        engine: Engine,
        client: Client,
        store_sync: StoreSync,
        checksummer: Checksummer,
        node: str,
        lend: Callable[[OpenShard], None] = lambda _: None,
    ) -> None:
        """`lend` makes a shard readable for the workers of this node. Raises OSError."""
        self._lend = lend
        self._engine = engine
        self._client = client
        self._store_sync = store_sync
        self._checksummer = checksummer
        self._node = node

    async def stage(self, request: Stage) -> tuple[StagedShard, ...]:
        """Stage all shards. Raises Unrestorable that names, for each missing shard, every source that was tried and why
        the source failed. Raises Unavailable if this node is the reason, because it has no descriptor or memory left.

        Raises Conflict if a newer generation is configured during the call. Only the returned shards stay locked, also after
        an error.
        """
        job = self._engine.jobs.get(request.job)
        if job is None or job.config is None:
            raise Conflict(f"job {request.job!r} has not been configured here: its shards cannot be fetched")
        if not request.shards:
            return ()
        generation = job.config.generation
        restores = _by_shard(request.shards)
        found: dict[ShardKey, _Found] = {}
        with job.wanting(restores):
            try:
                await self._find(job, request, restores, found)
                _require_current(job, generation)
                answers = tuple(self._answer(restore, found[restore.shard]) for restore in request.shards)
                # There is no await from here to the return, so a cancellation cannot leave shards locked.
                job.pin({item.held: item.shard for item in found.values()})
                found.clear()
                return answers
            finally:
                for item in found.values():
                    item.shard.close()
                self._engine.notify()

    async def _find(
        self, job: Job, request: Stage, restores: Mapping[ShardKey, RankRestore], found: dict[ShardKey, _Found]
    ) -> None:
        """Open every shard. Raises Unrestorable, Unavailable."""
        generation = job.config.generation if job.config else 0
        await self._engine.refresh(job)
        _require_current(job, generation)  # before the restored step is recorded
        first = request.shards[0].shard
        job.restored = first.checkpoint
        await self._engine.threads.urgent(self._engine.tiers.staged.drop_unfinished, job.name, job.restored)
        missing = {key: _Failures() for key in restores}
        with self._store_sync.pace.held(), freeze.patience(request.timeout_s) as limit:
            async with anyio.create_task_group() as tasks:
                for key, restore in restores.items():
                    tasks.start_soon(self._one, job, restore, found, missing[key])
        if len(found) < len(restores):
            late = f" (timed out after {request.timeout_s:g} s)" if limit.cancelled_caught else ""
            kind = Unavailable if any(failures.of_this_node for failures in missing.values()) else Unrestorable
            raise kind("; ".join(_why(restores[key], missing[key]) for key in restores if key not in found) + late)
        await self._engine.remember(job)

    async def _one(self, job: Job, restore: RankRestore, found: dict[ShardKey, _Found], failures: _Failures) -> None:
        item = await self._local(job, restore, failures) or await self._remote(job, restore, failures)
        if item is not None:
            found[restore.shard] = item

    async def _local(self, job: Job, restore: RankRestore, failures: _Failures) -> _Found | None:
        for held in job.holders(restore.shard):
            tier = self._engine.tiers[held.tier]
            try:
                shard = await self._engine.threads.urgent(
                    self._open_verified, tier, job.name, restore, discard=OpenShard.close
                )
            except IntegrityError as error:
                await self._engine.quarantine(job, held, str(error))
                failures.add(f"{held.tier.value} here", error)
            except (HoldfastError, OSError) as error:
                failures.add(f"{held.tier.value} here", error)
            else:
                return _Found(held, shard, tier.name)
        if not failures.reasons:
            failures.reasons.append("not held here")
        return None

    async def _remote(self, job: Job, restore: RankRestore, failures: _Failures) -> _Found | None:
        sources = [source for source in restore.sources if source.node != self._node]
        item, away = await self._from_any(job, restore, sources, 0.0, failures)
        if item is None and away:  # wait for a restart of a few seconds rather than restore an older step
            item, _ = await self._from_any(job, restore, away, AWAY_S, failures)
        return item

    async def _from_any(
        self, job: Job, restore: RankRestore, sources: Sequence[ShardSource], patience_s: float, failures: _Failures
    ) -> tuple[_Found | None, list[ShardSource]]:
        """Fetch the shard from the first source that has it. Also returns the sources whose replicator does not listen."""
        away: list[ShardSource] = []
        for source in sources:
            for tier in (Tier.STAGED, Tier.DISK):
                try:
                    with telemetry.span(
                        tracing.FETCH,
                        key=(label(restore.shard), source.node, tier.value, patience_s),
                        job=job.name,
                        node=self._node,
                        rank=restore.rank,
                        shard=label(restore.shard),
                        source=source.node,
                    ):
                        return await self._fetch(job, restore, source, tier, patience_s), away
                except OutOfSpace as error:
                    failures.reasons.append(str(error))  # memory is full; use the disk
                except Away as error:
                    away.append(source)
                    failures.add(source.node, error)
                    break
                except (HoldfastError, OSError) as error:
                    failures.add(source.node, error)
                    break
        return None, away

    async def _fetch(
        self, job: Job, restore: RankRestore, source: ShardSource, tier: Tier, patience_s: float
    ) -> _Found:
        files = self._engine.tiers.staged if tier is Tier.STAGED else self._engine.tiers.disk
        threads = self._engine.threads
        held = Held(tier, restore.shard)
        while True:
            try:
                await self._bring(job, restore, source, files, patience_s)
                shard = await threads.urgent(self._open, files, job.name, restore.shard, discard=OpenShard.close)
                break
            except Arriving:
                # Another transfer brings the same shard: one of a cancelled restore whose thread still runs, or a
                # peer's copy.
                if (arrived := await self._arrived(job, restore, files)) is not None:
                    shard = arrived
                    break
        log.info("shard fetched", job=job.name, shard=label(restore.shard), source=source.node, tier=tier.value)
        job.held[held] = shard.manifest
        return _Found(held, shard, source.node)

    async def _bring(
        self, job: Job, restore: RankRestore, source: ShardSource, tier: FileTier, patience_s: float
    ) -> None:
        if source.node == OBJECT_STORE:
            await self._store_sync.retrieve(job, restore, source, tier)
            return
        connections = of_one_transfer()
        what = (source, job.name, job.token, Wanted.of(restore), tier, connections, patience_s)
        await self._engine.threads.transfer(connections.close_all, self._client.fetch, *what)

    async def _arrived(self, job: Job, restore: RankRestore, tier: FileTier) -> OpenShard | None:
        """Wait for a moment, and return the shard if the other transfer has ended."""
        await anyio.sleep(ARRIVING_POLL_S)
        try:
            return await self._engine.threads.urgent(
                self._open_verified, tier, job.name, restore, discard=OpenShard.close
            )
        except (NotFound, Conflict, IntegrityError):
            return None

    def _open(self, tier: LocalTier, job: str, key: ShardKey) -> OpenShard:
        shard = tier.open(job, key)
        try:
            self._lend(shard)
        except BaseException:
            shard.close()
            raise
        return shard

    def _open_verified(self, tier: LocalTier, job: str, restore: RankRestore) -> OpenShard:
        shard = self._open(tier, job, restore.shard)
        try:
            due = shard.compared
            self._checksummer.verify(shard.manifest, shard.data, shard.reader.prefault, digests=due is not None)
            if due is not None:
                due()
            if why := Wanted.of(restore).differs(shard.manifest):
                raise NotFound(why)
        except BaseException:
            shard.close()
            raise
        return shard

    @staticmethod
    def _answer(restore: RankRestore, item: _Found) -> StagedShard:
        shard = item.shard
        return StagedShard(restore.rank, restore.shard, str(shard.path), item.source, size=shard.manifest.size)


def _require_current(job: Job, generation: int) -> None:
    """Raises Conflict if the generation has been replaced, because its locks would block the newer generation."""
    if job.gone or job.config is None or job.config.generation != generation:
        raise Conflict(f"generation {generation} of job {job.name} was overtaken while its shards were staged")


def _by_shard(restores: Sequence[RankRestore]) -> dict[ShardKey, RankRestore]:
    """Merge requests by shard, with all their sources. Ranks may restore from the same shard, which is staged once."""
    merged: dict[ShardKey, RankRestore] = {}
    for restore in restores:
        known = merged.setdefault(restore.shard, restore)
        sources = dict.fromkeys((*known.sources, *restore.sources))
        merged[restore.shard] = replace(
            known, digest=known.digest or restore.digest, root=known.root or restore.root, sources=tuple(sources)
        )
    return merged


def _why(restore: RankRestore, failures: _Failures) -> str:
    return f"rank {restore.rank} cannot restore {label(restore.shard)}: " + (
        "; ".join(failures.reasons) or "nothing was tried in time"
    )
