"""State of one job on this node: its configuration, its shards, its pinned shards. Used by the event loop only."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import anyio

from holdfast.domain.checkpoints import NOTHING_SAVED, CheckpointId
from holdfast.domain.errors import Conflict
from holdfast.domain.generations import ShardKey
from holdfast.domain.orders import Inventory
from holdfast.domain.replication import Configure
from holdfast.replicator.archive import JobArchive
from holdfast.replicator.holdings import Holdings
from holdfast.replicator.kept import KeptSince
from holdfast.replicator.tiers.pending_commit import PendingCommit
from holdfast.replicator.troubles import Troubles
from holdfast.replicator.view import Held, Tier, View, id_of
from holdfast.shards import Manifest
from holdfast.shards.opening import move_aside, open_stored
from holdfast.wire import records

REMEMBERED = "job.json"
REMEMBERED_BYTES_MAX = 16 << 20

_Received = frozenset[tuple[ShardKey, str]]  # (shard, peer)


class Pin(Protocol):
    """An open shard, which nobody overwrites before it is closed."""

    @property
    def path(self) -> Path: ...
    def close(self) -> None: ...


@dataclass(slots=True)
class Job:
    """`pins` are shards returned for a restore. Each is kept open, and therefore locked, until training has continued."""

    name: str
    config: Configure | None = None
    restored: CheckpointId | None = None
    held: Holdings = field(default_factory=Holdings)
    fresh: dict[ShardKey, PendingCommit] = field(default_factory=dict)  # images that are being committed
    pushed: dict[tuple[int, str], ShardKey] = field(default_factory=dict)  # (rank, peer) → the last shard on its disk
    sent: dict[tuple[int, str], ShardKey] = field(default_factory=dict)  # (rank, peer) → the last shard sent
    pins: dict[Held, Pin] = field(default_factory=dict)
    wanted: Counter[ShardKey] = field(default_factory=Counter)  # number of stagings in progress; not to be deleted
    tried: set[int] = field(default_factory=set)  # local ranks whose save failed in this generation
    archive: JobArchive = field(default_factory=JobArchive)
    saved_by_all: CheckpointId | None = None  # the newest (attempt, step) known to be on every node
    swept_before: CheckpointId = NOTHING_SAVED  # unfinished copies of older checkpoints have been deleted from the disk
    disk_full: bool = False
    disk_fails: bool = False  # operations return errors
    gone: bool = False  # deleted
    ended: bool = False  # no worker of the job saves any more
    images_left: bool = False  # the ended job's images have not been freed yet
    kept: KeptSince = field(default_factory=KeptSince)
    # Set and replaced by a new configuration and when the job is deleted.
    turned: anyio.Event = field(default_factory=anyio.Event)
    # (image, processes that have it locked) → since when
    locked: dict[tuple[Path, tuple[int, ...]], float] = field(default_factory=dict)
    refreshing: anyio.Lock = field(default_factory=anyio.Lock)
    troubles: Troubles = field(init=False)
    # `pushed` and `sent`, as the plan needs them.
    _received: tuple[_Received, _Received] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.troubles = Troubles(self.name)

    def configure(self, config: Configure) -> None:
        """Apply a configuration. A newer generation releases the shards from which the previous one was restored. Raises
        Conflict for an older one than the present."""
        before = self.config
        if before is not None and _is_older(config, before):
            raise Conflict(
                f"job {self.name}: generation {config.generation} comes after generation {before.generation}; "
                "only the newest is served"
            )
        self.config = config
        self.ended = self.images_left = False
        self.kept.submitted(config.first_attempt)
        self.archive.configured(before, config)
        self._turn()
        if before is None or config.generation > before.generation:
            self.release_pins()
            self.tried.clear()
        if before is not None and config.attempt != before.attempt:
            # Stage sets the restored step of the new attempt; without Stage it starts from scratch.
            self.restored = None
        peers = {peer.node for peer in config.peers}
        self.pushed = {(rank, peer): key for (rank, peer), key in self.pushed.items() if peer in peers}
        self.sent = {(rank, peer): key for (rank, peer), key in self.sent.items() if peer in peers}
        self._received = None

    def end(self, generation: int) -> bool:
        """Record the end of the job: no worker saves here unless the job is submitted again. Returns False for the end of an
        older run, and if the end is known."""
        if self.config is None or generation < self.config.generation or self.ended:
            return False
        self.ended = self.images_left = True
        self.kept.ended(self.config.attempt)
        self.release_pins()
        return True

    def retain(self, saved: CheckpointId) -> bool:
        """Record the newest checkpoint that all nodes have. Returns False if a newer one is known, because messages may arrive
        late and more than once."""
        if self.saved_by_all is not None and self.saved_by_all >= saved:
            return False
        self.saved_by_all = saved
        return True

    def upload(self, generation: int, step: int) -> None:
        """Record the request for an upload. Raises Conflict if it is not of the current generation."""
        if self.config is None or self.config.generation != generation:
            raise Conflict(f"generation {generation} of job {self.name!r} is not the current one on this node")
        self.archive.ask(self.config.attempt, step)

    def prune(self, steps: Collection[CheckpointId]) -> list[Held]:
        """Drop the shards of these checkpoints, and return them. Raises Conflict for one that a job that has not ended may
        need."""
        if needed := sorted(step for step in set(steps) if self.needs(step)):
            raise Conflict(f"job {self.name} has not ended and may need step {needed[0][1]} (attempt {needed[0][0]})")
        going = [held for held in self.held if id_of(held.key) in steps]
        for held in going:
            self.drop(held)
        return going

    def has_sent(self, key: ShardKey, peer: str, durable: ShardKey | None) -> bool:
        """Record that the peer has the shard, in memory at least, and the newest one of this rank on its disk. Returns False if
        the peer was asked before and does not have the shard on disk yet; at first, other shards of the step may be waiting."""
        if durable is not None:
            self.pushed[key.rank, peer] = durable
        else:  # it has lost or deleted what it had
            self.pushed.pop((key.rank, peer), None)
        asked_before = self.sent.get((key.rank, peer)) == key
        self.sent[key.rank, peer] = key
        self._received = None
        return durable == key or not asked_before

    def may_delete(self, held: Held) -> bool:
        """Whether no restore needs the shard now."""
        return held.key not in self.wanted and held not in self.pins

    def remembered(self) -> Remembered | None:
        """Return what survives this process, apart from the shards. None before the job is configured."""
        if self.config is None:
            return None
        return Remembered(
            self.config,
            self.restored,
            frozenset(self.archive.asked),
            self.saved_by_all,
            ended=self.ended,
            kept=tuple(sorted(self.kept.ages_s.items())),
        )

    def recall(self, remembered: Remembered) -> None:
        """Go on from what an earlier process has remembered."""
        self.config, self.restored = remembered.config, remembered.restored
        self.archive.asked = set(remembered.asked)
        self.saved_by_all = remembered.saved_by_all
        self.ended = self.images_left = remembered.ended
        self.kept.ages_s = dict(remembered.kept)

    def found(self, tier: Tier, manifests: Iterable[Manifest]) -> None:
        """Record the shards of a tier that an earlier process has left."""
        for manifest in manifests:
            self.held[Held(tier, manifest.key)] = manifest
            if tier is Tier.DISK and self.config is not None and manifest.rank in self.config.ranks:
                self.archive.saved(manifest)

    def forget(self) -> None:
        """Release everything, because the job's data is deleted."""
        self.gone = True
        self.release_pins()
        self._turn()

    def _turn(self) -> None:
        self.turned.set()
        self.turned = anyio.Event()

    @property
    def token(self) -> str:
        """The job's secret; "" before it is configured, which refuses all peers."""
        return self.config.token if self.config else ""

    def needs(self, step: CheckpointId) -> bool:
        """Whether a job that has not ended may restore this (attempt, step)."""
        if self.ended or self.config is None:
            return False
        if step.attempt >= self.config.attempt or step == self.restored:
            return True
        return self.restored is not None and self.config.first_attempt <= step.attempt and step < self.restored

    @contextmanager
    def wanting(self, keys: Iterable[ShardKey]) -> Iterator[None]:
        """Prevent the deletion of these shards inside the block."""
        counted = Counter(list(keys))  # the keys of a mapping
        self.wanted += counted
        try:
            yield
        finally:
            self.wanted -= counted

    def pin(self, shards: Mapping[Held, Pin]) -> None:
        """Keep these open until training has continued. Shards that an earlier request pinned for another step are
        released."""
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
        """Release the pins when every local rank has saved or tried to, which shows that it has finished its restore."""
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
        """Return this node's copies of a shard, nearest first."""
        return [held for tier in Tier if (held := Held(tier, key)) in self.held]

    def view(self) -> View:
        """Return the input of the plan."""
        config = self.config
        if self._received is None:
            self._received = _received(self.pushed), _received(self.sent)
        pushed, sent = self._received
        return View(
            attempt=config.attempt if config else 0,
            ranks=config.ranks if config else (),
            world_size=config.mesh.world_size if config else 0,
            keep=config.keep if config else 0,
            peers=tuple(peer.node for peer in config.peers) if config else (),
            held=self.held.copies,
            fresh=tuple(self.fresh),
            restored=self.restored,
            pushed=pushed,
            sent=sent,
            pinned=frozenset(self.pins) | {Held(tier, key) for key in self.wanted for tier in Tier},
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
        """Return one record per shard and tier. An image and a staged file of a shard are one record."""
        stored = self.archive.reported_steps(self.config.store_keep) if self.config else ()
        return Inventory(self.name, self.held.records(), stored)


@dataclass(frozen=True, slots=True)
class Remembered:
    """The state that survives this process, apart from the shards. A replicator that restarts during a generation must
    continue. Peers that replace a lost node may need shards of a job that has not been configured here since the restart."""

    config: Configure
    restored: CheckpointId | None = None
    # (attempt, step) to upload to the object store regardless of its interval.
    asked: frozenset[CheckpointId] = frozenset()
    saved_by_all: CheckpointId | None = None
    ended: bool = False
    kept: tuple[tuple[int, float], ...] = ()  # as in `KeptSince`

    def write(self, directory: Path) -> None:
        """Write the file atomically, readable only by its owner, because the configuration contains the job's secret. It is
        not fsynced, because a recovery waits for it, and after a power failure the next configuration replaces a lost or
        damaged file."""
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
        """Read the file; None if there is none. Raises MalformedMessage or IntegrityError for a damaged file, and OSError."""
        try:
            with open(open_stored(directory / REMEMBERED), "rb") as file:
                raw = file.read(REMEMBERED_BYTES_MAX)
        except FileNotFoundError:
            return None
        return records.loads(raw, cls)


def _received(last: Mapping[tuple[int, str], ShardKey]) -> _Received:
    return frozenset((key, peer) for (_, peer), key in last.items())


def _is_older(config: Configure, known: Configure) -> bool:
    """Compare the attempts as well, because generations restart at 1 if all state except the files was lost. Attempts always
    grow."""
    return config.generation < known.generation and config.attempt <= known.attempt
