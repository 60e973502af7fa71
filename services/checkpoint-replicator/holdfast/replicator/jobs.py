"""State of one job on this node: its configuration, its shards, its pinned shards. Used by the event loop only."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import ShardKey, ShardRecord
from holdfast.domain.orders import Inventory
from holdfast.domain.replication import Configure
from holdfast.replicator.archive import JobArchive
from holdfast.replicator.kept import KeptSince
from holdfast.replicator.tiers import OpenShard
from holdfast.replicator.tiers.pending_commit import PendingCommit
from holdfast.replicator.troubles import Troubles
from holdfast.replicator.view import Held, Store, View, id_of
from holdfast.shards import Manifest
from holdfast.shards.opening import move_aside, open_stored
from holdfast.wire import records

_TIER_NAMES = {Store.IMAGE: "memory", Store.STAGED: "memory", Store.DISK: "disk"}
REMEMBERED = "job.json"
REMEMBERED_BYTES_MAX = 16 << 20


@dataclass(slots=True)
class Job:
    """`pins` are shards handed out for a restore, each held open (and so locked) until training has gone on."""

    name: str
    config: Configure | None = None
    restored: CheckpointId | None = None
    held: dict[Held, Manifest] = field(default_factory=dict)
    fresh: dict[ShardKey, PendingCommit] = field(default_factory=dict)  # images that are being committed right now
    pushed: dict[tuple[int, str], ShardKey] = field(default_factory=dict)  # (rank, peer) → the last shard it took
    pins: dict[Held, OpenShard] = field(default_factory=dict)
    wanted: Counter[ShardKey] = field(default_factory=Counter)  # being staged right now, how often: not to be deleted
    tried: set[int] = field(default_factory=set)  # ranks here that have tried to save in this generation, and could not
    archive: JobArchive = field(default_factory=JobArchive)
    saved_by_all: CheckpointId | None = None  # the newest (attempt, step) that is known to be safe on every node
    disk_full: bool = False
    disk_fails: bool = False  # it answers with errors
    gone: bool = False  # forgotten
    ended: bool = False  # over: nobody saves here any more
    images_left: bool = False  # … and its images have not been given back yet
    kept: KeptSince = field(default_factory=KeptSince)
    turned: anyio.Event = field(default_factory=anyio.Event)  # set, and replaced, by a new configuration and by the end
    locked: dict[tuple[Path, tuple[int, ...]], float] = field(
        default_factory=dict
    )  # images that these read, since when
    refreshing: anyio.Lock = field(default_factory=anyio.Lock)
    troubles: Troubles = field(init=False)

    def __post_init__(self) -> None:
        self.troubles = Troubles(self.name)

    def configure(self, config: Configure) -> None:
        """A newer generation lets go of what the previous one was restored from."""
        before, self.config = self.config, config
        self.ended = self.images_left = False
        self.kept.submitted(config.first_attempt)
        self.archive.configured(before, config)
        self._turn()
        if before is None or config.generation > before.generation:
            self.release_pins()
            self.tried.clear()
        if before is not None and config.attempt != before.attempt:
            self.restored = None  # until Stage says from where the new attempt starts; if it never does, from scratch
        peers = {peer.node for peer in config.peers}
        self.pushed = {(rank, peer): key for (rank, peer), key in self.pushed.items() if peer in peers}

    def end(self) -> None:
        """No worker of it will save here again, unless it is submitted again."""
        assert self.config is not None
        self.ended = self.images_left = True
        self.kept.ended(self.config.attempt)
        self.release_pins()

    def forget(self) -> None:
        """Nothing of it is to stay."""
        self.gone = True
        self.release_pins()
        self._turn()

    def _turn(self) -> None:
        self.turned.set()
        self.turned = anyio.Event()

    @property
    def token(self) -> str:
        """The job's secret; "" before anybody has told it, and then nobody is let in."""
        return self.config.token if self.config else ""

    def needs(self, step: CheckpointId) -> bool:
        """Whether a job that is not over may go back to this (attempt, step): it is on its way there."""
        if self.ended or self.config is None:
            return False
        if step.attempt >= self.config.attempt or step == self.restored:
            return True
        return self.restored is not None and self.config.first_attempt <= step.attempt and step < self.restored

    @contextmanager
    def wanting(self, keys: Iterable[ShardKey]) -> Iterator[None]:
        """Meanwhile none of these is deleted."""
        counted = Counter(list(keys))  # of a mapping, its keys
        self.wanted += counted
        try:
            yield
        finally:
            self.wanted -= counted

    def pin(self, shards: Mapping[Held, OpenShard]) -> None:
        """Hold these open until training has gone on; what an earlier answer handed out for another step is let go of."""
        for held in [held for held in self.pins if held in shards or id_of(held.key) != self.restored]:
            self.pins.pop(held).close()
        self.pins.update(shards)

    @property
    def disk_takes_nothing(self) -> bool:
        return self.disk_full or self.disk_fails

    def release_pins(self) -> None:
        for shard in self.pins.values():
            shard.close()
        self.pins.clear()

    def release_pins_if_training(self) -> None:
        """Once every rank here has saved in this generation, or tried to, every rank here has finished its restore."""
        if self.config is None or not self.pins:
            return
        saved = self.tried | {
            held.key.rank
            for held in self.held
            if held.key.attempt == self.config.attempt and (self.restored is None or id_of(held.key) > self.restored)
        }
        if self.config.ranks and saved.issuperset(self.config.ranks):
            self.release_pins()

    def drop(self, held: Held) -> None:
        self.held.pop(held, None)
        if (pin := self.pins.pop(held, None)) is not None:
            pin.close()

    def holders(self, key: ShardKey) -> list[Held]:
        """Where it is held here, nearest first."""
        return [held for store in Store if (held := Held(store, key)) in self.held]

    def view(self) -> View:
        """What the plan sees."""
        config = self.config
        return View(
            attempt=config.attempt if config else 0,
            ranks=config.ranks if config else (),
            world_size=config.mesh.world_size if config else 0,
            keep=config.keep if config else 0,
            peers=tuple(peer.node for peer in config.peers) if config else (),
            held=tuple(self.held),
            fresh=tuple(self.fresh),
            restored=self.restored,
            pushed=frozenset((key, peer) for (_, peer), key in self.pushed.items()),
            pinned=frozenset(self.pins) | {Held(store, key) for key in self.wanted for store in Store},
            disk_full=self.disk_full,
            disk_fails=self.disk_fails,
            archive=self.archive.view(config) if config else None,
            saved_by_all=self.saved_by_all,
            first_attempt=config.first_attempt if config else 0,
            expired_before=self.kept.expired_before,
            ended=self.ended,
            images_left=self.images_left,
        )

    def inventory(self) -> Inventory:
        """One line per shard and tier; an image and a staged file of one shard are one line."""
        records = {
            (_TIER_NAMES[held.store], held.key): ShardRecord(
                key=held.key,
                mesh=manifest.domain_mesh(),
                tier=_TIER_NAMES[held.store],
                size=manifest.size,
                digest=manifest.digest,
                owner=manifest.node,
            )
            for held, manifest in self.held.items()
        }
        ordered = sorted(
            records.items(), key=lambda item: (item[0][1].attempt, item[0][1].step, item[0][1].rank, item[0][0])
        )
        stored = self.archive.told(self.config.store_keep) if self.config else ()
        return Inventory(self.name, tuple(record for _, record in ordered), stored)


@dataclass(frozen=True, slots=True)
class Remembered:
    """What survives this process, beside the shards: a replicator that died is started again in the middle of a generation
    and must go on; and peers that rebuild a lost node may need shards of a job that nobody has configured here since."""

    config: Configure
    restored: CheckpointId | None = None
    # (attempt, step) that go to the object store whatever its interval says.
    asked: frozenset[CheckpointId] = frozenset()
    saved_by_all: CheckpointId | None = None
    ended: bool = False
    kept: tuple[tuple[int, float], ...] = ()  # as in `KeptSince`

    def write(self, directory: Path) -> None:
        """Private to its owner: the configuration holds the job's secret. Atomic, but not synced: a recovery waits for this,
        and after a power cut a lost or damaged file only means to wait for the next configuration."""
        directory.mkdir(parents=True, exist_ok=True)
        temporary = directory / f".{REMEMBERED}.tmp"
        for place in (temporary, directory / REMEMBERED):
            if place.is_dir():
                move_aside(place)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(records.dumps(self, Remembered))
        temporary.rename(directory / REMEMBERED)

    @classmethod
    def read(cls, directory: Path) -> Remembered | None:
        """None when there is nothing. Raises MalformedMessage or IntegrityError for what is damaged, OSError."""
        try:
            with open(open_stored(directory / REMEMBERED), "rb") as file:
                raw = file.read(REMEMBERED_BYTES_MAX)
        except FileNotFoundError:
            return None
        return records.loads(raw, cls)


def held_of(store: Store, manifests: Iterable[Manifest]) -> dict[Held, Manifest]:
    return {Held(store, manifest.key): manifest for manifest in manifests}
