"""The replicator's state: the shards of this node, per job, and every operation that changes it.

Headers on disk and in memory are authoritative; this state is a cache of them. A worker's message only triggers a look, and a
periodic rescan finds saves whose message was lost. All state belongs to the event loop. Threads move bytes; they receive
values and return values.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import anyio
import structlog

from holdfast.domain.errors import (
    Conflict,
    HoldfastError,
    IntegrityError,
    InvalidSpec,
    MalformedMessage,
    Unavailable,
)
from holdfast.domain.names import job_name
from holdfast.domain.orders import Inventory
from holdfast.domain.replication import CommonCheckpoint, Configure, EndJob, PruneSteps, Trouble, TroubleKind, UploadNow
from holdfast.replicator.jobs import REMEMBERED, Job, Remembered
from holdfast.replicator.locks import name_of, readers
from holdfast.replicator.names import label
from holdfast.replicator.plan import images_may_go
from holdfast.replicator.threads import Threads
from holdfast.replicator.tiers import Damaged, LocalTier
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.images import ImageTier
from holdfast.replicator.tiers.pending_commit import PendingCommit
from holdfast.replicator.view import Held, Tier, id_of, is_kept
from holdfast.shards import Manifest
from holdfast.shards.opening import move_aside

GATHER_S = 0.01  # changes within this time after an inventory are one inventory
LOCKED_MAX_S = 120.0  # an image that is locked for longer delays saves

log = structlog.get_logger("holdfast.replicator")


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of this node, nearest first."""

    images: ImageTier
    staged: FileTier
    disk: FileTier

    def __getitem__(self, tier: Tier) -> LocalTier:
        match tier:
            case Tier.IMAGE:
                return self.images
            case Tier.STAGED:
                return self.staged
            case Tier.DISK:
                return self.disk

    def linked(self, job: str) -> list[Path]:
        """Return the directories of the job that are symbolic links."""
        return [path for path in (self.staged.directory(job), self.disk.directory(job)) if path.is_symlink()]

    @property
    def in_order(self) -> tuple[LocalTier, ...]:
        return tuple(self[tier] for tier in Tier)


class Engine:
    """Holds the jobs. `changed` is set and replaced at every change."""

    def __init__(self, tiers: Tiers, disk_dir: Path, threads: Threads) -> None:
        self.tiers = tiers
        self.threads = threads
        self.jobs: dict[str, Job] = {}
        self._disk_dir = disk_dir
        self._changed = anyio.Event()
        self._hints: set[str] = set()
        self._hinted = anyio.Event()

    # ------------------------------------------------------------ subscriptions

    def notify(self) -> None:
        """Wake the mover and every watcher after a change."""
        self._changed.set()
        self._changed = anyio.Event()

    @property
    def changed(self) -> anyio.Event:
        """The event of the next change. Get it *before* reading the state, so that no change is missed."""
        return self._changed

    async def watch(self, name: str) -> AsyncIterator[tuple[Inventory, tuple[Trouble, ...]]]:
        """Yield inventories with current problems, now and after each change, in order; `name` "" = every job, and an inventory
        without a job after the first of each. A slow reader misses intermediate states but not the last one."""
        nothing: tuple[Inventory, tuple[Trouble, ...]] = Inventory("", ()), ()
        sent = {name: nothing} if name else {}
        listed = bool(name)
        while True:
            changed, at = self.changed, anyio.current_time()
            names = [name] if name else sorted(set(self.jobs) | set(sent))
            for each in names:
                job = self.jobs.get(each)
                status = (job.inventory(), job.troubles.all()) if job else (Inventory(each, ()), ())
                if sent.get(each) != status:
                    sent[each] = status
                    yield status
                if job is None and not name:
                    sent.pop(each, None)
            if not listed:
                listed = True
                yield nothing
            await changed.wait()
            await anyio.sleep_until(at + GATHER_S)

    # ------------------------------------------------------------ requests

    async def configure(self, config: Configure) -> None:
        """Configure a job. Raises InvalidSpec for a name that cannot be a directory, and Conflict for an older generation or
        a directory that is a symbolic link."""
        for directory in self.tiers.linked(config.job):
            raise Conflict(f"{directory} is a symbolic link, which may lead to another job's checkpoints: remove it")
        job = self.job(config.job)
        job.configure(config)
        self.notify()
        await self.remember(job)

    async def archive(self, request: UploadNow) -> None:
        """Request an upload. Raises Conflict if the request is not of the job's current generation on this node."""
        job = self.jobs.get(request.job) or Job(request.job)  # of which no generation is the current one
        job.upload(request.generation, request.step)
        self.notify()
        await self.remember(job)

    async def retain(self, saved: CommonCheckpoint) -> None:
        """Retention updates may arrive late or more than once. Updates for unknown jobs are ignored."""
        job = self.jobs.get(saved.job)
        if job is not None and job.retain(saved.checkpoint_id):
            self.notify()
            await self.remember(job)

    async def remember(self, job: Job) -> None:
        """Store the job's state for the next start of this process. A full disk does not stop a restore."""
        if (remembered := job.remembered()) is None:
            return
        try:
            await self.threads.urgent(remembered.write, self._disk_dir / job.name)
        except OSError as error:
            log.warning("job configuration not stored", job=job.name, reason=str(error))

    async def end(self, request: EndJob) -> None:
        """Record the end of a job. A request for an older run or for an unknown job is ignored."""
        job = self.jobs.get(request.job)
        if job is not None and job.end(request.generation):
            self.notify()
            await self.remember(job)

    async def prune(self, request: PruneSteps, idle: Callable[[str], Awaitable[None]]) -> None:
        """Delete these steps from every tier. Raises Conflict for a step that a job that has not ended may need."""
        job = self.jobs.get(request.job)
        if job is None:
            return
        going = job.prune(request.steps)  # first, so that no reader is sent to a file that is being deleted
        self.notify()
        await idle(job.name)
        for held in going:
            await self.threads.urgent(self.tiers[held.tier].delete, job.name, held.key)
        log.info("checkpoints pruned", job=job.name, steps=len(request.steps), shards=len(going))
        if job.ended and not job.held:
            await self.forget(job.name, idle)

    async def free_images(self, job: Job) -> None:
        """Free the images of an ended job's workers."""
        await self.refresh(job)  # the message about the last save may have been lost
        async with job.refreshing:
            if not images_may_go(job.view()):
                return  # the last save is not on disk yet, or the job has been submitted again
            for held in [held for held in job.held if held.tier is Tier.IMAGE]:
                job.drop(held)
            await self.threads.urgent(self.tiers.images.forget, job.name)
            job.images_left = False
        self.notify()

    async def forget(self, name: str, idle: Callable[[str], Awaitable[None]]) -> None:
        """Delete all data of a job, in memory and on disk. `idle` waits until none of it is being copied.

        Raises Unavailable if some of it cannot be deleted.
        """
        job = self.jobs.pop(job_name(name), Job(name))
        job.forget()
        self.notify()
        await idle(name)
        async with job.refreshing:
            failed = [error for tier in self.tiers.in_order if (error := await self._forget(tier, name)) is not None]
        self.notify()
        if failed:
            raise Unavailable(f"some data of job {name} on this node could not be deleted: {failed[0]}")

    async def _forget(self, tier: LocalTier, name: str) -> OSError | None:
        try:
            await self.threads.urgent(tier.forget, name)
        except OSError as error:  # a file of another user, a read-only disk
            log.error("data of a job not deleted", job=name, tier=tier.name, reason=str(error))
            return error
        return None

    def job(self, name: str) -> Job:
        """Return the job, created if it is unknown."""
        if name not in self.jobs:
            self.jobs[job_name(name)] = Job(name)
        return self.jobs[name]

    def token_of(self, name: str) -> str:
        job = self.jobs.get(name)
        return job.token if job else ""

    # ------------------------------------------------------------ looking

    async def start(self) -> None:
        """Delete incomplete files of a crash, then list the shards. Bytes are verified when they are restored."""
        names = {name for tier in self.tiers.in_order for name in tier.jobs()}
        for name in sorted(names):
            try:
                job = self.job(name)
                remembered = Remembered.read(self._disk_dir / name)
                if remembered is not None and remembered.config.job != name:
                    raise Conflict(f"the configuration is of job {remembered.config.job!r}")
            except InvalidSpec as error:
                log.warning("directory ignored", name=name, reason=str(error))
                continue
            except (MalformedMessage, IntegrityError, Conflict, OSError) as error:
                log.warning("job configuration unreadable", job=name, reason=str(error))
                await self._set_aside_configuration(job, error)
                remembered = None
            if remembered is not None:
                job.recall(remembered)
            for place, tier in ((Tier.STAGED, self.tiers.staged), (Tier.DISK, self.tiers.disk)):
                swept = await self.threads.urgent(tier.sweep, name)
                manifests, damaged = await self.threads.urgent(tier.look, name)
                self._report_damaged(job, damaged)
                job.found(place, manifests)
                if swept:
                    log.info("incomplete files removed", job=name, tier=place.value, files=swept)
            await self.refresh(job)

    async def _set_aside_configuration(self, job: Job, error: Exception) -> None:
        path = self._disk_dir / job.name / REMEMBERED
        # After any other error the file stays: it may be readable later, or a user has copied it from another job.
        aside = not isinstance(error, OSError | Conflict)
        try:
            if aside:
                await self.threads.urgent(move_aside, path)
        except OSError:
            aside = False
        self._report_damaged(job, [Damaged(path, str(error), aside=aside)])

    @staticmethod
    def _report_damaged(job: Job, damaged: Iterable[Damaged]) -> bool:
        """Report damaged files. Returns whether any of them is new."""
        new = False
        for each in damaged:
            kind = TroubleKind.SET_ASIDE if each.aside else TroubleKind.LEFT_ALONE
            new |= job.troubles.begin(kind, each.path, each.reason)
        return new

    def missed(self, name: str, generation: int, rank: int) -> None:
        """Record that a rank could not save. It has therefore finished its restore, and its pinned shards can be released."""
        job = self.jobs.get(name)
        if job is not None and job.config is not None and job.config.generation == generation:
            job.tried.add(rank)
            job.release_pins_if_training()

    def hint(self, name: str) -> None:
        """Record that a worker may have saved. Cheap, and harmless if it has not."""
        self._hints.add(name)
        self._hinted.set()

    async def follow_hints(self) -> None:
        """Look at the images of workers that have saved. Never returns."""
        while True:
            await self._hinted.wait()
            self._hinted = anyio.Event()
            hints, self._hints = self._hints, set()
            for name in sorted(hints):
                await self._look(name)

    async def rescan(self, interval_s: float) -> None:
        """Find saves whose message was lost, images that are being overwritten, and files that somebody else has deleted. Never
        returns."""
        while True:
            for name in sorted({*self.jobs, *await self.threads.urgent(self.tiers.images.jobs)}):
                await self._look(name)
            for job in list(self.jobs.values()):
                await self._drop_deleted(job)
            await anyio.sleep(interval_s)

    async def _drop_deleted(self, job: Job) -> None:
        """Drop the shards that a user has deleted. Otherwise they would be listed, elected for a restore, and retention would
        delete older checkpoints because of them. Files that cannot be looked at are not deleted."""
        files = {Tier.STAGED: self.tiers.staged, Tier.DISK: self.tiers.disk}
        held = {each: manifest for each, manifest in job.held.items() if each.tier in files}
        deleted = await self.threads.urgent(
            lambda: [each for each in held if files[each.tier].is_deleted(job.name, each.key)]
        )
        gone = [each for each in deleted if job.held.get(each) is held[each]]  # neither dropped nor received meanwhile
        for each in gone:
            self.vanished(job, each)
        if gone:
            log.warning("shards deleted by another program", job=job.name, shards=len(gone), first=label(gone[0].key))

    async def watch_locks(self, interval_s: float) -> None:
        """Report images that a process keeps locked without a restore, because their workers cannot save into them. Never
        returns."""
        while True:
            await anyio.sleep(interval_s)
            for job in list(self.jobs.values()):
                if job.config is not None and job.config.ranks:
                    await self._look_at_locks(job)

    def unwatched(self) -> None:
        """Restart the observation of locks after a freeze, because a holder may have changed."""
        for job in self.jobs.values():
            job.locked = {}

    async def _look_at_locks(self, job: Job) -> None:
        try:
            locked = await self.threads.urgent(lambda: readers(self.tiers.images.paths(job.name)))
        except OSError as error:
            log.warning("lock table unreadable", reason=str(error))
            return
        now = anyio.current_time()
        restored = {pin.path for pin in job.pins.values()}
        job.locked = {each: job.locked.get(each, now) for each in locked.items() if each[0] not in restored}
        named = {path: (pids, now - since) for (path, pids), since in job.locked.items() if now - since >= LOCKED_MAX_S}
        changed = False
        for path, (pids, held_s) in named.items():
            who = ", ".join(map(name_of, pids))
            reason = f"locked for {held_s:.0f} s by {who} without a restore: its worker cannot save into it"
            changed |= job.troubles.begin(TroubleKind.IMAGE_LOCKED, path, reason)
        for place in job.troubles.places(TroubleKind.IMAGE_LOCKED) - {str(path) for path in named}:
            changed |= job.troubles.end(TroubleKind.IMAGE_LOCKED, place)
        if changed:
            self.notify()

    async def _look(self, name: str) -> None:
        if name in self.jobs or name in await self.threads.urgent(self.tiers.images.jobs):
            await self.refresh(self.job(name))

    async def refresh(self, job: Job) -> None:
        """Compare the images of a job with the state: commit new ones, drop those that are being overwritten."""
        async with job.refreshing:
            if job.gone:
                return
            images, damaged = await self.threads.urgent(self.tiers.images.look, job.name)
            if self._report_damaged(job, damaged):
                self.notify()
            seen = {each.header.stamp.key: each for each in images}
            before = dict(job.held)
            for held, manifest in before.items():
                if held.tier is Tier.IMAGE:
                    now = seen.get(held.key)
                    if now is None or now.header.stamp.created_at != manifest.created_at:
                        self.vanished(job, held)
            new = [each for key, each in seen.items() if Held(Tier.IMAGE, key) not in job.held]
            job.fresh = {each.header.stamp.key: PendingCommit(each) for each in new}
            if new:
                self.notify()  # the copy to disk starts before the checksums are computed
            try:
                async with anyio.create_task_group() as tasks:
                    for fresh in job.fresh.values():
                        tasks.start_soon(self._commit, job, fresh)
            finally:  # also for a commit that was cancelled before it began, because a thread waits for its result
                for key, fresh in job.fresh.items():
                    fresh.fail(Unavailable(f"{label(key)} could not be committed in memory"))
                job.fresh = {}
            await self._report_unwritten(job)
            job.release_pins_if_training()
            if job.held != before:
                self.notify()

    def vanished(self, job: Job, held: Held) -> None:
        """Remove a shard that its tier no longer has from the inventory. Log the loss of an earlier run's checkpoint that was
        only in memory, because the disk failed, and has been overwritten."""
        job.drop(held)
        self.notify()
        if held.tier is not Tier.IMAGE or not is_kept(view := job.view(), id_of(held.key)):
            return
        others = [id_of(each.key) for each in job.held if each.key.rank == held.key.rank]
        if not any(other >= id_of(held.key) and is_kept(view, other) for other in others):
            log.error("checkpoint of an earlier run lost: it was in memory only", job=job.name, shard=label(held.key))

    async def _report_unwritten(self, job: Job) -> None:
        """Report manifests that could not be written because memory is full. The checkpoint itself is still copied to
        disk and peers."""
        images = self.tiers.images
        unwritten = await self.threads.urgent(images.unwritten, job.name) if images.lacks_manifests else {}
        changed = False
        for path, why in unwritten.items():
            reason = f"cannot write the manifest of {path} ({why}); copies continue; free memory on this node"
            changed |= job.troubles.begin(TroubleKind.TIER_FAILS, "memory", reason)
        if not unwritten:
            changed = job.troubles.end(TroubleKind.TIER_FAILS, "memory")
        if changed:
            self.notify()

    async def _commit(self, job: Job, fresh: PendingCommit) -> None:
        key = fresh.seen.header.stamp.key
        try:
            manifest = await self.threads.commit(self.tiers.images.commit, job.name, fresh.seen)
        except Conflict as error:
            log.debug("shard overwritten before its commit", job=job.name, shard=label(key), reason=str(error))
            fresh.fail(Conflict(str(error)))
        except IntegrityError as error:
            await self.quarantine(job, Held(Tier.IMAGE, key), str(error))
        except HoldfastError as error:  # for example, a format of another release
            log.warning("shard commit failed", job=job.name, shard=label(key), reason=str(error))
            fresh.fail(error)
        except OSError as error:  # cannot be read now; the next refresh tries again
            job.troubles.begin(TroubleKind.TIER_FAILS, "memory", f"{label(key)}: {error}")
        else:
            job.held[Held(Tier.IMAGE, key)] = manifest
            job.archive.saved(manifest)
            fresh.promised.set_result(manifest)

    # ------------------------------------------------------------ changes made by others

    async def quarantine(self, job: Job, held: Held, reason: str) -> None:
        """Remove a corrupt shard from the inventory, and rename its file."""
        self.lost(job.name, held, reason)
        try:
            await self.threads.urgent(self.tiers[held.tier].quarantine, job.name, held.key)
        except OSError as error:
            log.error("corrupt shard not renamed", job=job.name, shard=label(held.key), reason=str(error))

    def lost(self, name: str, held: Held, reason: str) -> None:
        """Remove a corrupt shard from the inventory and report it."""
        log.error("corrupt shard quarantined", job=name, shard=label(held.key), tier=held.tier.value, reason=reason)
        if (job := self.jobs.get(name)) is not None:
            job.drop(held)
            job.troubles.begin(TroubleKind.SET_ASIDE, f"{label(held.key)} in {held.tier.value}", reason)
            self.notify()

    def arrived(self, name: str, manifest: Manifest, tier: Tier = Tier.DISK) -> None:
        """Record a copy received from a peer."""
        job = self.jobs.get(name)
        if job is None:  # the job was deleted during the transfer
            self.tiers[tier].delete(name, manifest.key)
            return
        job.held[Held(tier, manifest.key)] = manifest
        self.notify()
