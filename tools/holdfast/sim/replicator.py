"""The replicator of a simulated node. Production's `Job`, `plan` and `Schedule` decide what is copied, sent, uploaded and
deleted; memory, disk, network and object store are simulated.

    a worker saves ──► image ──► disk ──► peers
                                  └─────► object store

`_files` is what memory and disk hold. It survives this process, whose `Job` is made anew from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Protocol, assert_never

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import HoldfastError, IntegrityError, NotFound, Unavailable, Unrestorable
from holdfast.domain.generations import OBJECT_STORE, RankRestore, ShardKey
from holdfast.domain.orders import Inventory, Prepare
from holdfast.domain.replication import Configure
from holdfast.replicator.jobs import Job, Remembered
from holdfast.replicator.mover import CONFIRM_S
from holdfast.replicator.names import label
from holdfast.replicator.plan import images_may_go, plan
from holdfast.replicator.schedule import Lane, Schedule
from holdfast.replicator.store_sync import NotYet
from holdfast.replicator.view import (
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
)
from holdfast.replicator.wanted import Wanted
from holdfast.shards import Manifest
from holdfast.shards.layout import PAGE
from holdfast.sim.store import Store
from holdfast.sim.undisturbed import Undisturbed, is_on_disk
from holdfast.sim.world import World
from holdfast.wire import records

IMAGES = 2  # of each rank, as a worker has them
COPY_S = (0.01, 0.3)
COPY_SLOWLY_S = (2.0, 12.0)  # longer than the interval of the saves: such a node skips some
SLOW_SHARE = 0.15  # of the nodes
PLAN_S = 0.4  # changes within this time are one plan
SEND_S = (0.05, 0.4)
STORE_S = (0.3, 3.0)
DELETE_S = (0.0, 0.1)
REPORT_S = (0.6, 2.0)  # changes within this time are one report: a slow reader misses intermediate states


class Surroundings(Protocol):
    """What a replicator meets outside its machine."""

    @property
    def store(self) -> Store | None: ...
    def replicator_of(self, node: str) -> Replicator | None: ...
    def is_deleting(self, job: str, view: Callable[[], View], deleted: Held, node: str) -> None: ...
    def has_saved(self, job: str, node: str) -> None: ...


@dataclass(slots=True)
class _Pin:
    """A shard that is being restored from."""

    path: Path

    def close(self) -> None:
        pass


class Replicator:
    def __init__(
        self,
        world: World,
        around: Surroundings,
        name: str,
        now: Callable[[], float],
        report: Callable[[Inventory], None],
    ) -> None:
        """`now`: the clock of the machine. `report` receives each changed inventory."""
        self.world, self.around, self.name = world, around, name
        self._now, self._report = now, report
        self.jobs: dict[str, Job] = {}
        self._schedule = Schedule(world.chance)
        self._files: dict[str, dict[Held, Manifest]] = {}
        self._remembered: dict[str, Remembered] = {}  # by job, on disk; encoded and decoded when a process reads it
        # by job, with the machine's memory or disk; when
        self._lost: dict[str, dict[Held, tuple[float, Manifest]]] = {}
        self._rotten: set[tuple[str, Held]] = set()
        self._copying: set[tuple[str, ShardKey]] = set()  # being read; nobody overwrites these images
        self._pausing: set[Lane] = set()  # after a step that failed
        self._planning: set[str] = set()  # jobs with a change since the last plan
        self._reported: dict[str, Inventory] = {}  # the last, by job
        self._deletions_wait: dict[str, bool] = {}  # by job: whether the last plan has deletions that have not begun
        self._reporting: set[str] = set()  # jobs with a change since the last report
        self._life = 0
        self.alive = False
        self.plan_s, self.report_s = PLAN_S, REPORT_S
        self.slow_disk = world.chance.random() < SLOW_SHARE
        self.undisturbed = Undisturbed()  # for the promises

    # ------------------------------------------------------------ life and death

    def start(self) -> None:
        self.undisturbed.since = self.world.now
        self._life += 1
        self.alive = True
        self.jobs, self._schedule = {}, Schedule(self.world.chance)
        self._copying, self._pausing, self._planning, self._reporting = set(), set(), set(), set()
        self._reported, self._deletions_wait = {}, {}
        for name in sorted({*self._files, *self._remembered}):
            job = self.jobs[name] = Job(name)
            if name in self._remembered:
                job.recall(records.loads(records.dumps(self._remembered[name], Remembered), Remembered))
            for tier in Tier:
                job.found(tier, [each for held, each in self._files.get(name, {}).items() if held.tier is tier])
            self._go_on(job)

    def stop(self) -> None:
        self.alive = False
        self._life += 1
        self.undisturbed.since = self.world.now

    def lose_memory(self) -> None:
        self._lose({Tier.IMAGE, Tier.STAGED})

    def lose_disk(self) -> None:
        self._remembered.clear()
        self._lose({Tier.DISK})

    def _lose(self, tiers: set[Tier]) -> None:
        for job, files in self._files.items():
            for held in [held for held in files if held.tier in tiers]:
                self._lost.setdefault(job, {})[held] = (self.world.now, files.pop(held))

    def lost_since(self, job: str, at: float) -> dict[Held, Manifest]:
        """The copies that the machine has lost since `at`."""
        return {held: manifest for held, (when, manifest) in self._lost.get(job, {}).items() if when >= at}

    def rot(self, job: str, key: ShardKey) -> None:
        """Corrupt all copies of a shard on this node. This is detected when they are read."""
        self._rotten |= {(job, held) for held in self._files.get(job, {}) if held.key == key}
        self.undisturbed.since = self.world.now

    def files(self, job: str) -> Mapping[Held, Manifest]:
        return self._files.get(job, {})

    def intact(self, job: str) -> list[Held]:
        return [held for held in self._files.get(job, {}) if (job, held) not in self._rotten]

    def config_of(self, job: str) -> Configure:
        config = self.jobs[job].config
        assert config is not None
        return config

    @property
    def copy_s_max(self) -> float:
        return (COPY_SLOWLY_S if self.slow_disk else COPY_S)[1]

    def keys(self, job: str) -> list[ShardKey]:
        """Return the shards of which the machine has a copy, in memory or on disk."""
        return sorted({held.key for held in self._files.get(job, {})}, key=lambda key: (key.checkpoint, key.rank))

    # ------------------------------------------------------------ orders

    def configure(self, order: Prepare) -> None:
        """Raises Conflict for an older generation."""
        job = self._job(order.job)
        job.configure(Configure.of(order))
        self.undisturbed.since = self.world.now
        for lane in sorted(lane for lane in self._pausing if lane[0] == job.name):
            self._resume(job, lane)  # a new configuration may name another peer
        self._remember(job)
        self._changed(job)

    def stage(self, name: str, restores: Sequence[RankRestore]) -> None:
        """Bring the shards from which the ranks of this node restore. Raises Unrestorable."""
        if not restores:
            return
        job = self._job(name)
        job.restored = restores[0].shard.checkpoint
        with job.wanting({each.shard for each in restores}):
            found = [self._find(job, each) for each in restores]
        job.pin({held: _Pin(Path(held.tier, label(held.key))) for held in found})
        self._remember(job)
        self._changed(job)

    def upload(self, name: str, generation: int, step: int) -> None:
        """Raises Conflict if this generation is not the current one here."""
        job = self.jobs.get(name) or Job(name)
        job.upload(generation, step)
        self._remember(job)
        self._changed(job)

    def retain(self, name: str, saved: CheckpointId) -> None:
        job = self.jobs.get(name)
        if job is not None and job.retain(saved):
            self._remember(job)
            self._changed(job)

    def end(self, name: str, generation: int) -> None:
        job = self.jobs.get(name)
        if job is not None and job.end(generation):
            self._remember(job)
            self._changed(job)

    def prune(self, name: str, steps: frozenset[CheckpointId]) -> None:
        """Raises Conflict for a step that a job that has not ended may need."""
        job = self.jobs.get(name)
        if job is None:
            return
        for held in job.prune(steps):
            self._remove(job, held)
        self._changed(job)

    def forget(self, name: str) -> None:
        self._files.pop(name, None)
        self._remembered.pop(name, None)
        job = self.jobs.pop(name, None)
        if job is not None:
            job.forget()

    def inventory(self, name: str) -> Inventory:
        """Return the inventory for a report."""
        job = self.jobs.get(name)
        inventory = self._reported[name] = job.inventory() if job is not None else Inventory(name, ())
        return inventory

    # ------------------------------------------------------------ workers

    def save(
        self, order: Prepare, step: int, ranks: Iterable[int], content_of: Callable[[int], str]
    ) -> tuple[int, ...]:
        """Save the shards of these ranks, each into the older of its images. Returns the ranks whose images were not in use."""
        job, saved = self._job(order.job), []
        for rank in ranks:
            key = ShardKey(order.attempt, step, rank)
            if not self._free_an_image(job, rank):
                job.tried.add(rank)
                continue
            manifest = _manifest(order, self.name, key, content_of(rank), self._now(), job.restored)
            self._put(job, Held(Tier.IMAGE, key), manifest)
            job.archive.saved(manifest)
            saved.append(rank)
            self.undisturbed.saved(job.name, key, self.world.now)
        self.around.has_saved(job.name, self.name)
        job.release_pins_if_training()
        self._changed(job)
        return tuple(saved)

    def _free_an_image(self, job: Job, rank: int) -> bool:
        """The newest complete save is never overwritten, and no image that is being restored from."""
        images = [held for held in self._files.get(job.name, {}) if held.tier is Tier.IMAGE and held.key.rank == rank]
        if len(images) < IMAGES:
            return True
        images.sort(key=lambda held: held.key.checkpoint)
        free = (held for held in images[:-1] if (job.name, held.key) not in self._copying)
        victim = next((held for held in free if job.may_delete(held)), None)
        if victim is not None:
            job.drop(victim)
            self._remove(job, victim)
        return victim is not None

    def is_copying(self, name: str) -> bool:
        """Whether the newest save of this node is not on its disk yet."""
        job = self.jobs.get(name)
        images = [held.key for held in job.held if held.tier is Tier.IMAGE] if job is not None else []
        newest = max((key.checkpoint for key in images), default=None)
        return job is not None and any(
            key.checkpoint == newest and Held(Tier.DISK, key) not in job.held for key in images
        )

    # ------------------------------------------------------------ peers

    def take(self, name: str, token: str, manifest: Manifest) -> ShardKey | None:
        """Receive a copy. Returns the newest shard of this rank on this disk. Raises Unavailable for an unknown job."""
        job = self.jobs.get(name)
        if not self.alive or job is None or job.config is None or job.token != token:
            raise Unavailable(f"{self.name} does not answer, or does not know the job")
        if not job.holders(manifest.key):
            self._put(job, Held(Tier.STAGED, manifest.key), manifest)
            self._changed(job)
        durable = (held.key for held in job.held if held.tier is Tier.DISK and held.key.rank == manifest.rank)
        return max(durable, key=lambda key: key.checkpoint, default=None)

    def give(self, name: str, wanted: Wanted) -> Manifest | None:
        """Send a shard to a node that restores it. A copy that is found damaged is quarantined."""
        job = self.jobs.get(name)
        if not self.alive or job is None:
            return None
        for held in job.holders(wanted.key):
            if self._is_intact(job, held):
                manifest = job.held[held]
                return manifest if not wanted.differs(manifest) else None
        return None

    # ------------------------------------------------------------ the plan

    def _go_on(self, job: Job) -> None:
        """Compute the plan, after the changes that follow at once."""
        if job.name not in self._planning:
            self._planning.add(job.name)
            self.world.after(self.plan_s, self._unless_ended(partial(self._plan, job)))

    def _plan(self, job: Job) -> None:
        self._planning.discard(job.name)
        if self.jobs.get(job.name) is job:
            steps = plan(job.view())
            begun = self._schedule.begin(job.name, steps)
            self._deletions_wait[job.name] = _deletions(steps) > _deletions(chain.from_iterable(begun.values()))
            for lane, together in begun.items():
                if isinstance(together[0], CopyToDisk):
                    self._copying.add((job.name, together[0].key))
                self._go_on_with(job, together, lane)

    def _go_on_with(self, job: Job, steps: Sequence[Step], lane: Lane) -> None:
        """Carry out all deletions at once, as production does, and other steps one after the other."""
        now, later = (steps, ()) if isinstance(steps[0], Delete) else (steps[:1], steps[1:])
        act = partial(self._carry_out, job, now, later, lane, job.config)
        self.world.soon(*self._duration_s(steps[0]), self._unless_ended(act))

    def _carry_out(
        self, job: Job, now: Sequence[Step], later: Sequence[Step], lane: Lane, config: Configure | None
    ) -> None:
        step = now[0]
        try:
            for step in now:
                self._do(job, step)
        except HoldfastError as error:
            pause_s = self._schedule.pause_s(lane)
            if isinstance(step, Push) and isinstance(error, NotYet):
                pause_s = min(pause_s, CONFIRM_S)
            self._pausing.add(lane)
            self.world.after(pause_s, self._unless_ended(partial(self._resume, job, lane)))
        else:
            if later and job.config is config:
                self._report_soon(job)
                self._go_on_with(job, later, lane)
                return
            self._schedule.succeeded(lane)
            self._schedule.free(lane)
            self._report_soon(job)
            if not isinstance(step, Delete) or self._deletions_wait.get(job.name, True):
                self._go_on(job)  # a deletion makes no other work, and the plan has named all of them
        if isinstance(step, CopyToDisk):
            self._copying.discard((job.name, step.key))

    def _resume(self, job: Job, lane: Lane) -> None:
        if lane in self._pausing:
            self._pausing.discard(lane)
            self._schedule.free(lane)
            self._go_on(job)

    def _duration_s(self, step: Step) -> tuple[float, float]:
        match step:
            case CopyToDisk():
                return COPY_SLOWLY_S if self.slow_disk else COPY_S
            case Push():
                return SEND_S
            case Delete() | FreeImages():
                return DELETE_S
            case Upload() | Survey() | Complete() | Discard():
                return STORE_S
            case _:
                assert_never(step)

    def _do(self, job: Job, step: Step) -> None:
        """Raises HoldfastError."""
        match step:
            case CopyToDisk(key):
                self._put(job, Held(Tier.DISK, key), self._open(job, key, (Tier.IMAGE, Tier.STAGED)))
            case Push(key, peer):
                self._push(job, key, peer)
            case Delete(tier, key):
                if job.may_delete(held := Held(tier, key)):
                    self.around.is_deleting(job.name, job.view, held, self.name)
                    job.drop(held)
                    self._remove(job, held)
            case FreeImages():
                if images_may_go(job.view()):
                    for held in [held for held in job.held if held.tier is Tier.IMAGE]:
                        job.drop(held)
                        self._remove(job, held)
                    job.images_left = False
            case Upload(key):
                self._bucket().put(job.name, self._open(job, key, (Tier.DISK,)))
                job.archive.uploaded.add(key)
            case Survey():
                job.archive.found(self._bucket().survey(job.name))
            case Complete(ages):
                self._complete(job, ages)
            case Discard(checkpoint_id):
                self._bucket().discard(job.name, checkpoint_id)
                job.archive.discarded(checkpoint_id)
            case _:
                assert_never(step)

    def _push(self, job: Job, key: ShardKey, peer: str) -> None:
        if job.config is None or peer not in {each.node for each in job.config.peers}:
            return  # removed by a newer configuration
        manifest = self._open(job, key, (Tier.DISK, Tier.IMAGE, Tier.STAGED))
        other = self.around.replicator_of(peer)
        if other is None or self.world.loses(lambda: f"copy of {label(key)} to {peer}"):
            self.undisturbed.reached_since = self.world.now
            raise Unavailable(f"{peer} does not answer")
        durable = other.take(job.name, job.token, manifest)
        is_done = job.has_sent(key, peer, durable)
        if (pushed := job.pushed.get((key.rank, peer))) is not None:
            is_on_disk(other.name, other.files(job.name), pushed)
        if not is_done:
            raise NotYet(f"{label(key)} is in the memory of {peer}, not yet on its disk")

    def _complete(self, job: Job, ages: Sequence[CheckpointId]) -> None:
        assert job.config is not None
        for checkpoint_id in ages:
            stored = self._bucket().complete_step(job.name, checkpoint_id, job.config.mesh.world_size)
            if stored is not None:
                job.archive.completed(stored, owner=0 in job.config.ranks)
                return
        raise NotYet("not every rank's shard is in the store yet")

    def _bucket(self) -> Store:
        """Raises Unavailable."""
        store = self.around.store
        if store is None or store.away:
            raise Unavailable("the object store does not answer")
        return store

    # ------------------------------------------------------------ files

    def _open(self, job: Job, key: ShardKey, tiers: Sequence[Tier]) -> Manifest:
        """Raises NotFound if no intact copy is left there."""
        for held in (Held(tier, key) for tier in tiers):
            if held in job.held and self._is_intact(job, held):
                return job.held[held]
        raise NotFound(f"{self.name} no longer has {label(key)}")

    def _is_intact(self, job: Job, held: Held) -> bool:
        """Verify a copy. One that is damaged is quarantined."""
        if (job.name, held) not in self._rotten:
            return True
        job.drop(held)
        self._remove(job, held)
        self._changed(job)
        return False

    def _find(self, job: Job, restore: RankRestore) -> Held:
        """Return an intact local copy of the shard, fetched from the nearest source if there is none. Raises Unrestorable."""
        wanted = Wanted.of(restore)
        for held in job.holders(wanted.key):
            if self._is_intact(job, held) and not wanted.differs(job.held[held]):
                return held
        for source in restore.sources:
            try:
                manifest = self._fetched(source.node, source.job or job.name, wanted)
            except (Unavailable, IntegrityError):
                continue
            if manifest is not None:
                held = Held(Tier.STAGED, wanted.key)
                self._put(job, held, manifest)
                return held
        raise Unrestorable(f"no holder of {restore.shard} answers")

    def _fetched(self, source: str, name: str, wanted: Wanted) -> Manifest | None:
        if source == OBJECT_STORE:
            manifest = self._bucket().get(name, wanted.key)
            return manifest if manifest is not None and not wanted.differs(manifest) else None
        other = self.around.replicator_of(source)
        return other.give(name, wanted) if other is not None else None

    def _put(self, job: Job, held: Held, manifest: Manifest) -> None:
        job.held[held] = manifest
        self._files.setdefault(job.name, {})[held] = manifest
        self._rotten.discard((job.name, held))

    def _remove(self, job: Job, held: Held) -> None:
        self._files.get(job.name, {}).pop(held, None)
        self._rotten.discard((job.name, held))

    def _job(self, name: str) -> Job:
        job = self.jobs.get(name)
        if job is None:
            job = self.jobs[name] = Job(name)
        return job

    def _remember(self, job: Job) -> None:
        if (remembered := job.remembered()) is not None:
            self._remembered[job.name] = remembered

    def _changed(self, job: Job) -> None:
        """Continue the plan, and report the inventory."""
        self._go_on(job)
        self._report_soon(job)

    def _report_soon(self, job: Job) -> None:
        if job.name not in self._reporting:
            self._reporting.add(job.name)

            def report() -> None:
                self._reporting.discard(job.name)
                before = self._reported.get(job.name)
                if (inventory := self.inventory(job.name)) != before:
                    self._report(inventory)

            self.world.soon(*self.report_s, self._unless_ended(report))

    def _unless_ended(self, action: Callable[[], None]) -> Callable[[], None]:
        life = self._life

        def run() -> None:
            if self.alive and self._life == life:
                action()

        return run


def _deletions(steps: Iterable[Step]) -> int:
    return sum(1 for step in steps if isinstance(step, Delete))


def _manifest(
    order: Prepare, node: str, key: ShardKey, content: str, created_at: float, parent: CheckpointId | None
) -> Manifest:
    """The manifest of a shard of one page. Equal `content` has equal digests."""
    return Manifest(
        job=order.job,
        node=node,
        attempt=key.attempt,
        step=key.step,
        rank=key.rank,
        mesh=order.mesh.dims,
        parent=parent,
        size=PAGE,
        tensors_end=PAGE,
        digest=content,
        crc32c=0,
        span_crc32c=(0,),
        created_at=created_at,
        producer="simulated",
        span_blake3=f"{key.step}.{key.rank}".encode().ljust(32, b"."),
    )
