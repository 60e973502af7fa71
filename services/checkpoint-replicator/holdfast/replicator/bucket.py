"""One job's part of an object store: uploads and downloads shards, completes and deletes checkpoints. Blocking; call from a
thread.

Order of an upload: tensors, rest, the rank's manifest. The first node that finds the manifests of all ranks, and every object
that they name, writes the checkpoint's manifest if it does not exist. This manifest depends on the ranks' manifests alone, so
all nodes that race write the same bytes. A crash between any two of these steps leaves objects that are not part of a
checkpoint. They are reused, or deleted later."""

from __future__ import annotations

import json
import mmap
import threading
from collections import deque
from collections.abc import Collection, Generator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import Conflict, IncompatibleVersion, IntegrityError, NotFound, Unavailable
from holdfast.domain.generations import ShardKey, StoredStep
from holdfast.replicator.daemons import DaemonPool
from holdfast.replicator.names import label
from holdfast.replicator.sharing import Arrivals, Sharers
from holdfast.replicator.tiers import OpenShard
from holdfast.replicator.tiers.files import FileTier
from holdfast.replicator.tiers.incoming import Incoming
from holdfast.replicator.view import Archived
from holdfast.replicator.wanted import Wanted
from holdfast.shards import CHUNK_BYTES, Manifest
from holdfast.shards.layout import PAGE
from holdfast.shards.manifest import MANIFEST_BYTES_MAX
from holdfast.stores import ObjectStore, Pace, layout, transfer
from holdfast.stores.checksum import crc32c
from holdfast.stores.layout import CheckpointManifest, StepObjects
from holdfast.stores.transfer import Damage

READ_STREAMS = 3  # per fetched shard; each buffer holds two spans, so a fetch uses at most 4 × 16 MiB
READ_BYTES = 2 * CHUNK_BYTES
READ_TRIES_MAX = 3  # per piece that arrives damaged; the store retries failed requests itself
MANIFEST_STREAMS = 8
PROBLEM_CHARS_MAX = 1000

log = structlog.get_logger("holdfast.replicator.bucket")


@dataclass(frozen=True, slots=True)
class Surveyed:
    """A listing: every checkpoint, the newest complete ones with the contents of their manifests, and the uploaded shards."""

    steps: tuple[Archived, ...]  # newest first
    stored: Mapping[CheckpointId, StoredStep]
    uploaded: frozenset[ShardKey]


@dataclass(frozen=True, slots=True)
class Bucket:
    store: ObjectStore
    job: str

    # ------------------------------------------------------------ up

    def another_uploads(self, manifest: Manifest) -> bool:
        """Whether another replica, which holds the same tensors, is to upload them and has not finished yet.

        The replicas take turns by step, so that each uploads the same amount over time.
        """
        mesh = manifest.domain_mesh()
        position = mesh.position_of(manifest.rank)
        rank = mesh.ranks_at(position)[(position + manifest.step) % mesh.dp]
        if rank == manifest.rank or self.store.stat(layout.tensors_key(manifest)) is not None:
            return False
        # If that rank's manifest exists and these tensors do not, that rank has other tensors: the state is sharded over dp.
        finished = layout.rank_manifest_key(self.job, ShardKey(manifest.attempt, manifest.step, rank))
        return self.store.stat(finished) is None

    def upload(self, shard: OpenShard, pace: Pace) -> None:
        """Upload a shard. Raises IntegrityError if it does not match its manifest, and Conflict if the store contains another
        save."""
        manifest = shard.manifest
        tensors, rest = _tensors_of(shard), _rest_of(shard)
        if self.store.stat(tensors.key) is None:
            self.store.put(tensors.key, tensors.parts, crc32c=tensors.crc32c, if_absent=True, pace=pace)
        self.store.put(rest.key, rest.parts, crc32c=rest.crc32c, if_absent=True, pace=pace)
        self._put_rank_manifest(manifest)

    def complete(self, attempt: int, step: int, world_size: int) -> CheckpointManifest | None:
        """Return the checkpoint's manifest, which is written if it does not exist; None while a shard is missing.

        Raises IntegrityError if the ranks' shards do not belong to one checkpoint.
        """
        if self.store.stat(layout.manifest_key(self.job, attempt, step)) is not None:
            return layout.load(self.store, self.job, attempt, step)
        sizes = {info.key: info.size for info in self.store.list(layout.step_prefix(self.job, attempt, step))}
        keys = [layout.rank_manifest_key(self.job, ShardKey(attempt, step, rank)) for rank in range(world_size)]
        if not all(key in sizes for key in keys):
            return None
        with DaemonPool(min(MANIFEST_STREAMS, world_size), "manifests") as pool:
            raw = list(pool.map(lambda key: self.store.read(key, MANIFEST_BYTES_MAX), keys))
        checkpoint = CheckpointManifest.of(raw)
        for entry in checkpoint.ranks:
            if (sizes.get(entry.tensors), sizes.get(entry.rest)) != (entry.tensors_size, entry.rest_size):
                raise IntegrityError(
                    f"the shard of rank {entry.rank} in step {step} is not complete in {self.store.url}"
                )
        self._put_once(checkpoint.key, checkpoint.encode(), layout.CHECKPOINT_MANIFEST_BYTES_MAX)
        return checkpoint

    def _put_once(self, key: str, content: bytes, size_max: int) -> None:
        if not self._is_new(key, content) and self.store.read(key, size_max) != content:
            raise self._another(key)

    def _put_rank_manifest(self, manifest: Manifest) -> None:
        """An earlier release may have written the manifest of the same save, without digests."""
        key = layout.rank_manifest_key(self.job, manifest.key)
        if not self._is_new(key, manifest.encode()):
            try:
                found = Manifest.decode(self.store.read(key, MANIFEST_BYTES_MAX)).without_digests()
            except (IntegrityError, IncompatibleVersion):
                found = None
            if found != manifest.without_digests():
                raise self._another(key)

    def _is_new(self, key: str, content: bytes) -> bool:
        return self.store.put(key, [content], crc32c=crc32c(content), if_absent=True)

    def _another(self, key: str) -> Conflict:
        return Conflict(f"{self.store.url} has another {key}: two runs of one name save into the same store")

    # ------------------------------------------------------------ listing

    def survey(self, known: Collection[StoredStep], newest: int) -> Surveyed:
        """List the checkpoints. Reads the manifests of the `newest` complete ones that are not `known`."""
        found = layout.survey(self.store, self.job)
        descriptions = {step.id: step for step in known}
        stored: dict[CheckpointId, StoredStep] = {}
        damaged: set[CheckpointId] = set()
        for each in found:
            checkpoint_id = CheckpointId(each.attempt, each.step)
            if not each.complete or len(stored) == newest:
                continue
            if each.damaged:
                damaged.add(checkpoint_id)
            try:
                found_step = (
                    descriptions.get(checkpoint_id) or layout.load(self.store, self.job, *checkpoint_id).stored_step
                )
                stored[checkpoint_id] = replace(found_step, damage=each.damage)
            except (IntegrityError, IncompatibleVersion, NotFound) as error:
                damaged.add(checkpoint_id)  # is treated as incomplete
                log.warning("checkpoint skipped", job=self.job, store=self.store.url, reason=str(error))
        last = max((each.updated_at for each in found), default=0.0)
        return Surveyed(
            steps=tuple(_archived(each, last, damaged) for each in found),
            stored=stored,
            uploaded=frozenset(ShardKey(each.attempt, each.step, rank) for each in found for rank in each.ranks),
        )

    def discard(self, attempt: int, step: int) -> None:
        layout.delete_step(self.store, self.job, attempt, step)

    def damage(self, attempt: int, step: int, ranks: Collection[int], pace: Pace) -> list[Damage]:
        """Read the shards of these ranks in a complete checkpoint and return the damage found. Raises NotFound,
        IntegrityError, IncompatibleVersion, Unavailable."""
        checkpoint = layout.load(self.store, self.job, attempt, step)
        return list(transfer.verify(self.store, checkpoint, pace, ranks=ranks))

    def examine(self, key: ShardKey) -> list[Damage]:
        """Read a shard that arrived damaged again, including tensors shared with replicas. Returns the damage in the store;
        empty if the shard was damaged in transfer. Raises as `damage` does."""
        checkpoint = layout.load(self.store, self.job, key.attempt, key.step)
        tensors = checkpoint.entry(key.rank).tensors
        shared_from = next(entry.rank for entry in checkpoint.ranks if entry.tensors == tensors)
        return list(transfer.verify(self.store, checkpoint, ranks={key.rank, shared_from}))

    def mark(self, damage: Damage, attempt: int, step: int) -> bool:
        """Write a damage marker next to a complete checkpoint. Returns False if the checkpoint no longer exists."""
        if self.store.stat(layout.manifest_key(self.job, attempt, step)) is None:
            return False
        marker = json.dumps({"object": damage.key, "problem": damage.problem[:PROBLEM_CHARS_MAX]}).encode()
        self.store.put(
            layout.damaged_key(self.job, ShardKey(attempt, step, damage.rank)), [marker], crc32c=crc32c(marker)
        )
        return True

    def unmark(self, key: ShardKey) -> bool:
        """Delete the damage marker of this rank. Returns False if there was none."""
        marker = layout.damaged_key(self.job, key)
        if self.store.stat(marker) is None:
            return False
        self.store.delete(marker)
        return True

    def repair_object(self, shard: OpenShard, damaged: str, pace: Pace) -> None:
        """Replace one object of a complete checkpoint. Closes the shard. Raises IntegrityError if the shard is not the one in
        the checkpoint, and Unavailable."""
        with shard:
            manifest, key = shard.manifest, shard.manifest.key
            entry = layout.load(self.store, self.job, key.attempt, key.step).entry(key.rank)
            written = (manifest.encode(), manifest.without_digests().encode())  # the second by an earlier release
            raw = next((each for each in written if crc32c(each) == entry.manifest_crc32c), None)
            if raw is None:
                raise IntegrityError(f"{label(key)} on this node and in {self.store.url} are of different saves")
            whole = (_tensors_of(shard), _rest_of(shard), _Object(entry.manifest, (raw,), entry.manifest_crc32c))
            for each in whole:
                if each.key == damaged:
                    self.store.put(each.key, each.parts, crc32c=each.crc32c, pace=pace)

    # ------------------------------------------------------------ down

    def manifest_of(self, wanted: Wanted, here: str = "") -> Manifest:
        """Return the manifest in a complete checkpoint, as a copy on the nodes of job `here` has it. Raises NotFound,
        IntegrityError, IncompatibleVersion, Unavailable."""
        key = wanted.key
        checkpoint = layout.load(self.store, self.job, key.attempt, key.step)
        manifest = layout.load_rank(self.store, checkpoint, key.rank)
        if why := wanted.differs(replace(manifest, job=here or self.job)):
            raise IntegrityError(f"{self.store.url} has a shard in place of {label(key)}: {why}")
        return manifest

    def fetch(
        self,
        manifest: Manifest,
        into: FileTier,
        donor: OpenShard | None,
        sharing: tuple[Sharers, Arrivals] | None = None,
        job: str = "",
        cancelled: threading.Event | None = None,
    ) -> Path:
        """Download a shard and commit it in `into`. Every span is verified, and an interrupted download is resumed. `job` is
        the local job if it differs from the job of the bucket. When `cancelled` is set, it raises Unavailable, and the
        received spans are kept for the next attempt.

        Tensors of `donor`, a shard with equal tensors on this node, are not downloaded again. With `sharing`, nodes exchange
        the tensors that each of them downloads. Raises as `FileTier.receive` and the store do.
        """
        here = job or self.job
        sharers, arrivals = sharing or (None, None)
        with ExitStack() as stack:
            incoming = stack.enter_context(into.receive(here, replace(manifest, job=here)))
            announce = stack.enter_context(arrivals.announcing(here, incoming, into)) if arrivals else None
            pieces = [piece for piece in _pieces(manifest) if not incoming.has(piece.first_span, piece.end_span)]
            if sharers is not None:
                pieces.sort(key=lambda piece: (piece.of_tensors, sharers.turn(piece.number)))
            ahead = self._read_ahead(pieces, donor, sharers, cancelled or threading.Event())
            for piece, content in stack.enter_context(closing(ahead)):
                self._take_in(incoming, piece, content, sharers)
                if announce is not None:
                    announce()
            return incoming.commit()

    def _read_ahead(
        self, pieces: list[_Piece], donor: OpenShard | None, sharers: Sharers | None, cancelled: threading.Event
    ) -> Generator[tuple[_Piece, memoryview], None, None]:
        """Yield the pieces in order, reading several in parallel. A piece's content is valid until the next one is
        requested."""
        free = [memoryview(mmap.mmap(-1, READ_BYTES)) for _ in range(min(READ_STREAMS + 1, len(pieces)))]
        coming: deque[tuple[_Piece, memoryview, Future[None]]] = deque()
        todo = iter(pieces)
        with DaemonPool(READ_STREAMS, "retrieve") as pool:
            while True:
                if cancelled.is_set():
                    raise Unavailable(f"the fetch from {self.store.url} was cancelled")
                while free and (piece := next(todo, None)) is not None:
                    buffer = free.pop()
                    coming.append((piece, buffer, pool.submit(self._read, piece, buffer[: piece.size], donor, sharers)))
                if not coming:
                    return
                piece, buffer, read = coming.popleft()
                read.result()
                yield piece, buffer[: piece.size]
                free.append(buffer)

    def _read(self, piece: _Piece, content: memoryview, donor: OpenShard | None, sharers: Sharers | None) -> None:
        if donor is not None and piece.of_tensors:
            content[:] = donor.data[piece.start : piece.start + piece.size]
        elif sharers is None or not piece.of_tensors or not sharers.read(piece.number, piece.start, content):
            self.store.read_into(piece.key, content, piece.offset)

    def _take_in(self, incoming: Incoming, piece: _Piece, content: memoryview, sharers: Sharers | None) -> None:
        for tries in range(1, READ_TRIES_MAX + 1):
            try:
                for number in range(piece.first_span, piece.end_span):
                    span = incoming.spans[number]
                    start = span.offset - piece.start
                    incoming.write_span(number, content[start : start + span.size])
            except IntegrityError as error:
                # read it from the store, in case it was damaged in transfer, in the donor or by another node
                if tries == READ_TRIES_MAX:
                    raise IntegrityError(f"{self.store.url}: {error}") from error
                if sharers is not None and piece.of_tensors:
                    sharers.give_up(piece.number, str(error))
                self.store.read_into(piece.key, content, piece.offset)
            else:
                return


@dataclass(frozen=True, slots=True)
class _Object:
    """An object to upload: a part of a shard."""

    key: str
    parts: tuple[memoryview | bytes, ...]
    crc32c: int


def _tensors_of(shard: OpenShard) -> _Object:
    manifest = shard.manifest
    parts = (layout.tensors_part(shard.data, manifest),)
    return _Object(layout.tensors_key(manifest), parts, layout.tensors_crc32c(manifest))


def _rest_of(shard: OpenShard) -> _Object:
    manifest = shard.manifest
    parts = layout.rest_parts(shard.data, manifest)
    return _Object(layout.rest_key(manifest.job, manifest.key), parts, layout.rest_crc32c(manifest))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Adjacent spans of a shard that are stored in one object at `offset`. Equal tensors have equal pieces."""

    number: int  # index within its object
    start: int  # offset in the shard
    size: int
    first_span: int
    end_span: int  # exclusive
    key: str
    offset: int
    of_tensors: bool


def _pieces(manifest: Manifest) -> list[_Piece]:
    pieces: list[_Piece] = []
    for span_number, span in enumerate(manifest.spans):
        key, offset = _place_of(manifest, span.offset)
        last = pieces[-1] if pieces else None
        if last and last.key == key and last.offset + last.size == offset and last.size + span.size <= READ_BYTES:
            pieces[-1] = replace(last, size=last.size + span.size, end_span=span_number + 1)
        else:
            tensors = PAGE <= span.offset < manifest.tensors_end
            number = last.number + 1 if last and last.key == key else 0
            pieces.append(_Piece(number, span.offset, span.size, span_number, span_number + 1, key, offset, tensors))
    return pieces


def _place_of(manifest: Manifest, offset: int) -> tuple[str, int]:
    """Return the object and the offset in it of a byte of the shard."""
    if PAGE <= offset < manifest.tensors_end:
        return layout.tensors_key(manifest), offset - PAGE
    return layout.rest_key(
        manifest.job, manifest.key
    ), offset if offset < PAGE else PAGE + offset - manifest.tensors_end


def _archived(found: StepObjects, last: float, damaged: set[CheckpointId]) -> Archived:
    checkpoint_id = (found.attempt, found.step)
    whole = checkpoint_id not in damaged
    idle_s = max(0.0, last - found.updated_at)
    return Archived(
        *checkpoint_id, complete=found.complete and whole, idle_s=idle_s, damaged=found.complete and not whole
    )
