"""Executes the plan: one step at a time per lane (each rank's way to disk, each peer, deletions), newest first.

A failed step is not retried by itself: its lane pauses, and then the plan is computed again from the current state.

Events come in groups: a save, the same of each rank, its copies. So there are at most `1 / GATHER_S` plans per second, and none
for a job whose view has not changed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import assert_never

import anyio
import structlog

from holdfast.domain.errors import Conflict, HoldfastError, IntegrityError, NotFound, OutOfSpace
from holdfast.domain.generations import ShardKey
from holdfast.domain.replication import TroubleKind
from holdfast.replicator.checksum import Checksummer
from holdfast.replicator.engine import Engine
from holdfast.replicator.jobs import Job
from holdfast.replicator.names import label
from holdfast.replicator.plan import plan
from holdfast.replicator.schedule import Lane, Schedule, is_disk
from holdfast.replicator.store_sync import NotYet, StoreSync
from holdfast.replicator.tiers import OpenShard
from holdfast.replicator.tiers.pending_commit import PendingCommit
from holdfast.replicator.transport.client import Client
from holdfast.replicator.view import (
    ArchiveStep,
    Complete,
    CopyToDisk,
    Delete,
    Discard,
    FreeImages,
    Held,
    Push,
    Step,
    Survey,
    Tier,
    Upload,
    View,
    what,
)
from holdfast.runtime.telling import metrics, telemetry
from holdfast.shards import Manifest

log = structlog.get_logger("holdfast.replicator")

IMAGE_READ_S_MAX = 2.0  # an image that is read for longer could delay a save
PUSH_BYTES_PER_S = 1e9  # assumed until a rate has been measured
CONFIRM_S = 0.5  # between two questions whether a copy is on the peer's disk; a newer save is pushed sooner
ASK_S = 0.05  # between a copy and the first question whether it is on the peer's disk: before, it is not, even if it is small
GATHER_S = 0.01  # changes within this time after a plan are one plan
LOST_RACE_PAUSE_S = 0.005  # after the first failure of a step


class _LostRace(NotFound):
    """The source of a planned step no longer exists."""


class Mover:
    def __init__(
        self,
        engine: Engine,
        client: Client,
        checksummer: Checksummer,
        store_sync: StoreSync,
        *,
        disk_pace: Callable[[int], None],
        peer_pace: Callable[[int], None],
    ) -> None:
        self._engine = engine
        self._client = client
        self._disk_pace = disk_pace
        self._peer_pace = peer_pace
        self._checksummer = checksummer
        self._store_sync = store_sync
        self._push_rate: dict[tuple[str, str], float] = {}  # (job, peer) → bytes per second of the latest push
        self._schedule = Schedule()
        self._lost_race: dict[Lane, Step] = {}  # the last step of each lane whose source no longer existed
        # the last plan of each job, and what it was made from
        self._planned: dict[str, tuple[View, Sequence[Step]]] = {}

    async def run(self) -> None:
        """Never returns."""
        async with anyio.create_task_group() as tasks:
            while True:
                changed, at = self._engine.changed, anyio.current_time()
                self._planned = {job.name: self._plan(job) for job in self._engine.jobs.values()}
                for job in list(self._engine.jobs.values()):
                    for lane, steps in self._schedule.begin(job.name, self._planned[job.name][1]).items():
                        tasks.start_soon(self._carry_out, job, steps, lane)
                await changed.wait()
                await anyio.sleep_until(at + GATHER_S)

    async def idle(self, name: str) -> None:
        """Wait until no shard of this job is being copied or deleted. Uploads are not waited for, because they only read."""
        while self._schedule.moves_shards_of(name):
            await self._engine.changed.wait()

    def _plan(self, job: Job) -> tuple[View, Sequence[Step]]:
        view, known = job.view(), self._planned.get(job.name)
        return known if known is not None and known[0] == view else (view, plan(view))

    async def _carry_out(self, job: Job, steps: Sequence[Step], lane: Lane) -> None:
        step, config = steps[0], job.config
        try:
            if deletions := [each for each in steps if isinstance(each, Delete)]:
                await self._delete(job, deletions)
            for step in steps:
                # another may name other peers
                if not (isinstance(step, Delete) or job.gone or job.config is not config):
                    await self._do(job, step)
        except _LostRace as error:
            # The source was overwritten first, which is normal if saves are frequent. Refresh and plan with the newest.
            self._log_failure(job, step, error)
            again, self._lost_race[lane] = self._lost_race.get(lane) == step, step
            await anyio.sleep(self._schedule.pause_s(lane) if again else LOST_RACE_PAUSE_S)
            await self._engine.refresh(job)
        except (HoldfastError, OSError) as error:
            pause_s = self._schedule.pause_s(lane)
            self._log_failure(job, step, error)
            if isinstance(step, Push) and isinstance(error, NotYet):
                pause_s = min(pause_s, CONFIRM_S)
            if not job.gone:
                with anyio.move_on_after(pause_s):
                    await job.turned.wait()  # a new configuration may name another peer and ends the pause
            if is_disk(lane):
                job.disk_full = job.disk_fails = False  # try again
        else:
            self._schedule.succeeded(lane)
            self._lost_race.pop(lane, None)
            if isinstance(step, Push) and job.pushed.get((step.key.rank, step.peer)) != step.key:
                with anyio.move_on_after(ASK_S):
                    await job.turned.wait()
        finally:
            self._schedule.free(lane)
            self._engine.notify()

    async def _do(self, job: Job, step: CopyToDisk | Push | FreeImages | ArchiveStep) -> None:
        match step:
            case CopyToDisk(key):
                await self._copy(job, key)
                _count(job, key, "disk")
            case Push(key, peer):
                await self._push(job, key, peer)
                _count(job, key, "peer")
            case FreeImages():
                await self._engine.free_images(job)
            case Upload(key):
                await self._upload(job, key)
                _count(job, key, "store")
            case Survey() | Complete() | Discard():
                await self._store_sync.carry_out(job, step)
            case _:
                assert_never(step)
        _log_completed(job, step)

    async def _copy(self, job: Job, key: ShardKey) -> None:
        fresh = job.fresh.get(key)
        try:
            manifest = await (self._copy_held(job, key) if fresh is None else self._copy_fresh(job, fresh))
        except (OutOfSpace, OSError) as error:
            job.disk_full = isinstance(error, OutOfSpace)
            job.disk_fails = not job.disk_full
            if not job.gone:
                job.troubles.begin(TroubleKind.TIER_FAILS, "disk", f"{label(key)}: {error}")
            self._engine.notify()  # peers are the next tier in this case
            raise
        job.troubles.end(TroubleKind.TIER_FAILS, "disk")
        job.held[Held(Tier.DISK, key)] = manifest
        self._engine.notify()
        if key.checkpoint > job.swept_before:  # once for all ranks of a node
            job.swept_before = key.checkpoint
            await self._engine.threads.background(self._engine.tiers.disk.drop_unfinished, job.name, key.checkpoint)

    async def _copy_held(self, job: Job, key: ShardKey) -> Manifest:
        held, shard = await self._open(job, key, (Tier.IMAGE, Tier.STAGED))

        def copy() -> None:
            with shard:
                self._engine.tiers.disk.put(job.name, shard, self._disk_pace)

        try:
            await self._engine.threads.background(copy)
        except IntegrityError as error:
            await self._engine.quarantine(job, held, str(error))
            raise
        return shard.manifest

    async def _copy_fresh(self, job: Job, fresh: PendingCommit) -> Manifest:
        disk = self._engine.tiers.disk
        try:
            return await self._engine.threads.background(disk.put_fresh, job.name, fresh, self._disk_pace)
        except Conflict as error:
            raise _LostRace(str(error)) from error

    async def _push(self, job: Job, key: ShardKey, peer_name: str) -> None:
        peer = next((peer for peer in job.config.peers if peer.node == peer_name), None) if job.config else None
        if peer is None:
            return  # removed by a newer configuration
        held, shard = await self._open(job, key, self._push_from(job, peer_name, key))
        sent = job.sent.get((key.rank, peer_name)) == key

        moved: list[int] = []  # bytes; none if the peer has the shard

        def pace(nbytes: int) -> None:
            moved.append(nbytes)
            self._peer_pace(nbytes)

        def push() -> ShardKey | None:
            with shard:
                began = time.monotonic()
                durable = self._client.push(peer, job.name, job.token, shard, pace, sent=sent)
                if moved:
                    self._push_rate[job.name, peer_name] = sum(moved) / max(time.monotonic() - began, 1e-6)
            return durable

        try:
            durable = await self._engine.threads.background(push)
        except IntegrityError:  # the peer found a damaged span: check whether the local copy is damaged
            await self._verify(job, held)
            raise
        if not job.has_sent(key, peer_name, durable):
            raise NotYet(f"{label(key)} is in the memory of {peer_name}, not yet on its disk")

    def _push_from(self, job: Job, peer: str, key: ShardKey) -> tuple[Tier, ...]:
        """Return the tiers to push from: memory first if the push is quick, because a worker cannot save into an image
        being read."""
        size = _size(job, key)
        quick = size <= IMAGE_READ_S_MAX * self._push_rate.get((job.name, peer), PUSH_BYTES_PER_S)
        return (Tier.IMAGE, Tier.DISK, Tier.STAGED) if quick else (Tier.DISK, Tier.IMAGE, Tier.STAGED)

    async def _upload(self, job: Job, key: ShardKey) -> None:
        await self._store_sync.wait_for_replica(job, key)
        # A worker cannot save into an image that is being read.
        tiers = tuple(Tier) if job.disk_takes_nothing else (Tier.DISK,)
        held, shard = await self._open(job, key, tiers)
        try:
            await self._store_sync.upload(job, shard)
        except IntegrityError:
            await self._verify(job, held)
            raise
        job.archive.uploaded.add(key)

    async def _verify(self, job: Job, held: Held) -> None:
        def verify() -> None:
            with self._engine.tiers[held.tier].open(job.name, held.key) as shard:
                self._checksummer.verify(shard.manifest, shard.data, shard.reader.prefault, digests=True)

        try:
            await self._engine.threads.background(verify)
        except IntegrityError as error:
            await self._engine.quarantine(job, held, str(error))

    async def _delete(self, job: Job, steps: Sequence[Delete]) -> None:
        """Delete what no restore needs by now. Raises OSError after all, if one of the files could not be deleted."""
        going = [held for step in steps if job.may_delete(held := Held(step.tier, step.key))]
        for held in going:
            job.drop(held)  # first, so that no reader is sent to a file that is being deleted
        self._engine.notify()

        def delete() -> list[OSError]:
            failed: list[OSError] = []
            for held in going:
                try:
                    self._engine.tiers[held.tier].delete(job.name, held.key)
                except OSError as error:
                    failed.append(error)
            return failed

        if failed := await self._engine.threads.background(delete):
            raise failed[0]
        for step in steps:
            _log_completed(job, step)

    async def _open(self, job: Job, key: ShardKey, tiers: tuple[Tier, ...]) -> tuple[Held, OpenShard]:
        """Open the shard in the first of these tiers that has it. A tier that no longer has it loses it in the inventory, too.
        Raises _LostRace with the reasons."""
        reasons: list[str] = []
        for held in (Held(tier, key) for tier in tiers):
            if held not in job.held:
                continue
            try:
                return held, await self._engine.threads.urgent(
                    self._engine.tiers[held.tier].open, job.name, key, discard=OpenShard.close
                )
            except IntegrityError as error:
                await self._engine.quarantine(job, held, str(error))
                reasons.append(str(error))
            except (HoldfastError, OSError) as error:
                if isinstance(error, NotFound):  # otherwise, the plan would name it again
                    self._engine.vanished(job, held)
                reasons.append(str(error))
        raise _LostRace("; ".join(reasons) or f"this node no longer has {label(key)}")

    @staticmethod
    def _log_failure(job: Job, step: Step, error: Exception) -> None:
        """Log a failed step. A superseded source and a step that other nodes still upload are normal, so their level is
        debug."""
        write = log.debug if isinstance(error, _LostRace | NotYet) else log.warning
        write("plan step failed", job=job.name, step=type(step).__name__, what=what(step), reason=str(error))


def _log_completed(job: Job, step: Step) -> None:
    log.debug("plan step completed", job=job.name, step=type(step).__name__, what=what(step), reason=step.reason)


def _size(job: Job, key: ShardKey) -> int:
    """Return the size in bytes; 0 if this node no longer has the shard."""
    return next((job.held[held].size for held in job.holders(key)), 0)


def _count(job: Job, key: ShardKey, tier: str) -> None:
    telemetry.record(metrics.REPLICATED, _size(job, key), job=job.name, tier=tier)
