"""Receives copies from peers, each over one or several connections.

If there is room, a copy is received in memory. The received copy survives the loss of its sender, and the sender can reuse its
image. The plan then copies the shard to disk like every other newest shard in memory, and its digests are compared then if the
connection was encrypted. If memory has no room, or the peer supports only the disk, the copy is written to disk directly."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from holdfast.domain.errors import OutOfSpace, Unavailable
from holdfast.domain.generations import ShardKey
from holdfast.replicator.names import label
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.incoming import Incoming
from holdfast.replicator.view import Tier
from holdfast.shards import Manifest

_Name = tuple[str, ShardKey, int]  # job, shard, checksum of the file


class Taking:
    """One copy that is being received. The last of its connections commits it, and the others wait for the commit."""

    def __init__(self, tier: Tier, incoming: Incoming) -> None:
        self.tier = tier
        self.incoming = incoming
        self.over = False  # committed or failed
        self._committed = False
        self._ended = threading.Condition()

    def finish(self, patience_s: float) -> bool:
        """Called by a connection that has delivered its spans. Returns when the copy is committed, with True for the
        connection that committed it. Raises Unavailable if another connection has failed, or after `patience_s` without
        progress."""
        what = label(self.incoming.manifest.key)
        with self._ended:
            if self.incoming.whole and not self.over:
                self.incoming.commit()
                self._committed = self.over = True
                self._ended.notify_all()
                return True
            arrived = self.incoming.arrived
            while not self._ended.wait_for(lambda: self.over, patience_s):
                if self.incoming.arrived == arrived:
                    raise Unavailable(f"no more bytes of {what} arrived within {patience_s:g} s")
                arrived = self.incoming.arrived
            if not self._committed:
                raise Unavailable(f"another connection of the transfer of {what} has failed")
            return False

    def fail(self) -> None:
        with self._ended:
            self.over = True
            self._ended.notify_all()


@dataclass(slots=True)
class _Entry:
    users: int = 0
    opening: threading.Lock = field(default_factory=threading.Lock)
    taking: Taking | None = None


@dataclass(frozen=True, slots=True)
class Intake:
    """Thread-safe."""

    memory: FileTier
    disk: FileTier
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _entries: dict[_Name, _Entry] = field(default_factory=dict)

    def held(self, job: str, manifest: Manifest) -> Tier | None:
        """Return the tier that already has this copy; disk is preferred to memory."""
        places = ((Tier.DISK, self.disk), (Tier.STAGED, self.memory))
        return next((tier for tier, files in places if files.has(job, manifest)), None)

    @contextmanager
    def taking(self, job: str, manifest: Manifest, *, memory: bool) -> Iterator[Taking]:
        """Join or start the reception of a copy. Raises Conflict if another transfer brings the shard, OutOfSpace, and
        IntegrityError for an inconsistent manifest."""
        name = (job, manifest.key, manifest.crc32c)
        with self._lock:
            entry = self._entries.setdefault(name, _Entry())
            entry.users += 1
        try:
            # The first connection verifies the spans of an earlier transfer; the others wait for it.
            with entry.opening:
                if entry.taking is None:
                    entry.taking = self._open(job, manifest, memory=memory)
            try:
                yield entry.taking
            except BaseException:
                entry.taking.fail()
                raise
        finally:
            self._leave(name, entry)

    def _open(self, job: str, manifest: Manifest, *, memory: bool) -> Taking:
        if memory and self.memory.has_room(manifest.size):
            try:
                return Taking(Tier.STAGED, self.memory.incoming(job, manifest, later=True))
            except OutOfSpace:
                pass  # another transfer has taken the space; use the disk
        return Taking(Tier.DISK, self.disk.incoming(job, manifest))

    def _leave(self, name: _Name, entry: _Entry) -> None:
        with self._lock:
            entry.users -= 1
            if self._entries.get(name) is entry and (not entry.users or (entry.taking and entry.taking.over)):
                del self._entries[name]  # a later connection starts a new reception
            last = not entry.users
        if last and entry.taking is not None:
            entry.taking.incoming.close()
