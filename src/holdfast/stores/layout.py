"""Keys of a checkpoint in an object store, and the condition under which a set of objects is a checkpoint.

    {job}/a{attempt}-s{step}/p{position}-{digest}.tensors   bytes [PAGE, tensors_end) of a shard file
    {job}/a{attempt}-s{step}/rank-{rank}.rest               its header page and extra (RNG, sampler …): one per rank
    {job}/a{attempt}-s{step}/rank-{rank}.json               its manifest, the bytes of `holdfast.shards.Manifest`
    {job}/a{attempt}-s{step}/manifest.json                  `CheckpointManifest`: written last, and only if absent
    {job}/a{attempt}-s{step}/rank-{rank}.damaged            damage marker of its shard; deleted after a repair

Tensors are named by their content: data-parallel replicas of one state have equal bytes and share one object, which the first
of them writes. A checkpoint is complete if and only if manifest.json exists. A damage marker next to it marks a corrupt shard.
A listing alone therefore shows which checkpoints can be restored. A deletion removes the manifest first. Numbers are padded,
so keys are sorted by attempt and step.

Only the functions at the end, which receive a store, do I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import IntegrityError, NotFound
from holdfast.domain.generations import ShardKey, StoredStep
from holdfast.domain.mesh import Mesh
from holdfast.shards import Manifest
from holdfast.shards.layout import PAGE
from holdfast.shards.manifest import MANIFEST_BYTES_MAX
from holdfast.shards.sealed import UNDECODABLE, lineage_fields, seal, unseal
from holdfast.stores.checksum import combine, crc32c
from holdfast.stores.protocol import ObjectInfo, ObjectStore, check_key

SCHEMA_VERSION = 1
CHECKPOINT_MANIFEST_BYTES_MAX = 64 << 20  # about 150,000 ranks
MANIFEST_NAME = "manifest.json"
RANKS_SHOWN_MAX = 8
CHECKSUM = "crc32c"

_STEP = re.compile(r"a(\d{12,18})-s(\d{12,18})", re.ASCII)
_RANK_MANIFEST = re.compile(r"rank-(\d{1,9})\.json", re.ASCII)
_DAMAGED = re.compile(r"rank-(\d{1,9})\.damaged", re.ASCII)
_DIGEST = re.compile(r"([0-9a-f]{8})-([0-9a-f]{1,16})", re.ASCII)


# ---------------------------------------------------------------- keys


def step_prefix(job: str, attempt: int, step: int) -> str:
    """Return the prefix of all objects of one checkpoint, with a slash at the end."""
    return f"{job}/a{attempt:012d}-s{step:012d}/"


def manifest_key(job: str, attempt: int, step: int) -> str:
    return step_prefix(job, attempt, step) + MANIFEST_NAME


def tensors_key(manifest: Manifest) -> str:
    """Return the key of the index and tensors of this shard, and of every replica with equal tensors."""
    position = manifest.domain_mesh().position_of(manifest.rank)
    return f"{step_prefix(manifest.job, manifest.attempt, manifest.step)}p{position}-{manifest.digest}.tensors"


def rest_key(job: str, key: ShardKey) -> str:
    return f"{step_prefix(job, key.attempt, key.step)}rank-{key.rank}.rest"


def rank_manifest_key(job: str, key: ShardKey) -> str:
    return f"{step_prefix(job, key.attempt, key.step)}rank-{key.rank}.json"


def damaged_key(job: str, key: ShardKey) -> str:
    return f"{step_prefix(job, key.attempt, key.step)}rank-{key.rank}.damaged"


def rank_of(key: str, name: re.Pattern[str] = _RANK_MANIFEST) -> int | None:
    """Return the rank whose manifest has this key; None for any other object."""
    found = name.fullmatch(key.rpartition("/")[2])
    return int(found[1]) if found else None


# ---------------------------------------------------------------- the parts of a shard


def tensors_part(shard: memoryview, manifest: Manifest) -> memoryview:
    """Return the content of the object `tensors_key`, as a view into the mapped shard file."""
    return shard[PAGE : manifest.tensors_end]


def rest_parts(shard: memoryview, manifest: Manifest) -> tuple[memoryview, memoryview]:
    """Return the content of the object `rest_key`, in this order: header page, extra."""
    return shard[:PAGE], shard[manifest.tensors_end : manifest.size]


def tensors_crc32c(manifest: Manifest) -> int:
    """Return the checksum of the object `tensors_key` from the manifest's spans, so that a byte corrupted locally is
    detected too."""
    return _checksum_of_spans(manifest, tensors=True)


def rest_crc32c(manifest: Manifest) -> int:
    return _checksum_of_spans(manifest, tensors=False)


def _checksum_of_spans(manifest: Manifest, *, tensors: bool) -> int:
    spans = zip(manifest.spans, manifest.span_crc32c, strict=True)
    return combine((value, s.size) for s, value in spans if (PAGE <= s.offset < manifest.tensors_end) == tensors)


# ---------------------------------------------------------------- the manifest of a checkpoint


@dataclass(frozen=True, slots=True)
class RankEntry:
    """One rank's objects of a checkpoint. Keys are relative to the store, not to the step."""

    rank: int
    size: int  # bytes of the shard file
    tensors_end: int
    digest: str  # of index and tensors
    tensors: str  # key
    rest: str  # key
    manifest: str  # key
    manifest_crc32c: int  # of the object `manifest`

    @property
    def tensors_size(self) -> int:
        return self.tensors_end - PAGE

    @property
    def rest_size(self) -> int:
        return PAGE + self.size - self.tensors_end


@dataclass(frozen=True, slots=True)
class CheckpointManifest:
    """A complete checkpoint in the store. It is computed from the ranks' manifests only, so every node computes the same
    bytes."""

    job: str
    attempt: int
    step: int
    parent: CheckpointId | None  # (attempt, step) from which the attempt started
    mesh: tuple[tuple[str, int], ...]
    sharded: bool  # replicas hold different tensors at some model-parallel index
    created_at: float  # Unix seconds, of the last rank's save
    ranks: tuple[RankEntry, ...]  # by rank, all ranks of the mesh
    schema: int = SCHEMA_VERSION

    @classmethod
    def of(cls, rank_manifests: Iterable[bytes]) -> CheckpointManifest:
        """Create it from the bytes of every rank's manifest, in any order.

        Raises IntegrityError if they are of different checkpoints, or if a rank is missing or duplicated;
        IncompatibleVersion for a newer one.
        """
        shards = sorted(((Manifest.decode(raw), raw) for raw in rank_manifests), key=lambda shard: shard[0].rank)
        if not shards:
            raise IntegrityError("a checkpoint of no ranks")
        first = shards[0][0]
        for manifest, _ in shards:
            if _identity(manifest) != _identity(first):
                raise IntegrityError(f"{manifest.key} and {first.key} are not of the same checkpoint")
        checkpoint = cls(
            job=first.job,
            attempt=first.attempt,
            step=first.step,
            parent=first.parent,
            mesh=first.mesh,
            sharded=_sharded(manifest for manifest, _ in shards),
            created_at=max(manifest.created_at for manifest, _ in shards),
            ranks=tuple(_entry(manifest, raw) for manifest, raw in shards),
        )
        checkpoint._check()
        return checkpoint

    def domain_mesh(self) -> Mesh:
        return Mesh(self.mesh)

    @property
    def stored_step(self) -> StoredStep:
        return StoredStep(self.attempt, self.step, self.domain_mesh(), self.sharded)

    @property
    def key(self) -> str:
        return manifest_key(self.job, self.attempt, self.step)

    def entry(self, rank: int) -> RankEntry:
        """Return the entry of a rank. Raises NotFound for a rank outside of the mesh."""
        if not 0 <= rank < len(self.ranks):
            raise NotFound(f"the checkpoint of step {self.step} has ranks 0 to {len(self.ranks) - 1}, no rank {rank}")
        return self.ranks[rank]

    def rank_manifest(self, rank: int, raw: bytes) -> Manifest:
        """Decode a rank's manifest. Raises IntegrityError if its checksum is not that in the checkpoint's manifest."""
        entry = self.entry(rank)
        if crc32c(raw) != entry.manifest_crc32c:
            raise IntegrityError(f"{entry.manifest} does not match {self.key}: its checksum differs")
        manifest = Manifest.decode(raw)
        if _entry(manifest, raw) != entry or (manifest.job, manifest.step) != (self.job, self.step):
            raise IntegrityError(f"{entry.manifest} does not match {self.key}")
        return manifest

    # ------------------------------------------------------------ bytes

    def encode(self) -> bytes:
        return seal("checkpoint", asdict(self))

    @classmethod
    def decode(cls, raw: bytes) -> CheckpointManifest:
        """Decode a manifest. Raises IntegrityError if `encode` did not write it, and IncompatibleVersion for a newer
        schema."""
        fields = unseal("checkpoint", raw, schema=SCHEMA_VERSION, what="checkpoint manifest")
        try:
            ranks = tuple(RankEntry(**entry) for entry in fields["ranks"])
            checkpoint = cls(**(fields | lineage_fields(fields) | {"ranks": ranks}))
            checkpoint._check()
        except UNDECODABLE as error:
            raise IntegrityError(f"not a checkpoint manifest: {error!r}") from error
        return checkpoint

    def _check(self) -> None:
        """Validate the values before use, because numbers become memory sizes and keys become paths."""
        world = self.domain_mesh().world_size
        if len(self.ranks) != world or any(entry.rank != rank for rank, entry in enumerate(self.ranks)):
            raise IntegrityError(f"the checkpoint of step {self.step} does not have each of its {world} ranks once")
        prefix = step_prefix(self.job, self.attempt, self.step)
        for entry in self.ranks:
            numbers = (entry.size, entry.tensors_end, entry.manifest_crc32c)
            if not all(type(number) is int for number in numbers) or not PAGE <= entry.tensors_end <= entry.size:
                raise IntegrityError(f"the checkpoint's sizes of rank {entry.rank} are impossible: {numbers!r}")
            for key in (entry.tensors, entry.rest, entry.manifest):
                if not check_key(key).startswith(prefix):
                    raise IntegrityError(f"the checkpoint of step {self.step} points outside of itself: {key!r}")


def _identity(manifest: Manifest) -> tuple[Any, ...]:
    """Return the values that all ranks of a checkpoint have in common."""
    return manifest.job, manifest.attempt, manifest.step, manifest.parent, manifest.mesh


def _sharded(manifests: Iterable[Manifest]) -> bool:
    digests: dict[int, set[str]] = {}
    for manifest in manifests:
        digests.setdefault(manifest.domain_mesh().position_of(manifest.rank), set()).add(manifest.digest)
    return any(len(different) > 1 for different in digests.values())


def _entry(manifest: Manifest, raw: bytes) -> RankEntry:
    if manifest.checksum != CHECKSUM:
        raise IntegrityError(
            f"{manifest.key} has checksums of {manifest.checksum}; an object store verifies {CHECKSUM}"
        )
    if not _DIGEST.fullmatch(manifest.digest):
        raise IntegrityError(f"the manifest of {manifest.key} has no digest that could name an object")
    return RankEntry(
        rank=manifest.rank,
        size=manifest.size,
        tensors_end=manifest.tensors_end,
        digest=manifest.digest,
        tensors=tensors_key(manifest),
        rest=rest_key(manifest.job, manifest.key),
        manifest=rank_manifest_key(manifest.job, manifest.key),
        manifest_crc32c=crc32c(raw),
    )


# ---------------------------------------------------------------- with a store


@dataclass(frozen=True, slots=True)
class StepObjects:
    """One step in a listing: whether it is complete, which ranks have manifests, and the time of the last object."""

    attempt: int
    step: int
    complete: bool
    ranks: tuple[int, ...]  # ranks whose manifests exist
    objects: int
    size: int  # bytes
    updated_at: float  # Unix s, by the store's clock
    keys: tuple[str, ...] = field(repr=False)
    damaged: tuple[int, ...] = ()  # ranks with a damage marker

    @property
    def restorable(self) -> bool:
        return self.complete and not self.damaged

    @property
    def damage(self) -> str:
        """Describe the damage; empty if there is no marker."""
        ranks = ", ".join(map(str, self.damaged[:RANKS_SHOWN_MAX])) + (" …" if self.damaged[RANKS_SHOWN_MAX:] else "")
        return f"the shard of rank {ranks} is damaged" if self.damaged else ""


def survey(store: ObjectStore, job: str) -> list[StepObjects]:
    """Return every step that has an object, newest first, from one listing. Raises Unavailable."""
    found = [
        _step_objects(attempt, step, list(objects))
        for (attempt, step), objects in groupby(_objects_of(store, job), key=lambda item: item[0])
    ]
    return sorted(found, key=lambda objects: (objects.attempt, objects.step), reverse=True)


def steps(store: ObjectStore, job: str) -> list[CheckpointId]:
    """Return (attempt, step) of every restorable checkpoint, newest first, from a listing only. Raises Unavailable."""
    return [CheckpointId(found.attempt, found.step) for found in survey(store, job) if found.restorable]


def load(store: ObjectStore, job: str, attempt: int, step: int) -> CheckpointManifest:
    """Load a manifest. Raises NotFound if there is no such complete checkpoint, IntegrityError, IncompatibleVersion,
    Unavailable."""
    key = manifest_key(job, attempt, step)
    checkpoint = CheckpointManifest.decode(store.read(key, CHECKPOINT_MANIFEST_BYTES_MAX))
    if (checkpoint.job, checkpoint.attempt, checkpoint.step) != (job, attempt, step):
        raise IntegrityError(f"{key} is the manifest of another checkpoint: {checkpoint.key}")
    return checkpoint


def load_rank(store: ObjectStore, checkpoint: CheckpointManifest, rank: int) -> Manifest:
    """Load the manifest of one rank's shard. Raises NotFound, IntegrityError, IncompatibleVersion, Unavailable."""
    return checkpoint.rank_manifest(rank, store.read(checkpoint.entry(rank).manifest, MANIFEST_BYTES_MAX))


def delete_step(store: ObjectStore, job: str, attempt: int, step: int) -> None:
    """Delete all objects of one step, the manifest first, so that an interrupted deletion leaves no checkpoint. Raises
    Unavailable.

    The ranks' manifests are deleted next, so that no node can complete the checkpoint again. The checkpoint's manifest is
    deleted again at the end, in case a node completed it just before.
    """
    store.delete(manifest_key(job, attempt, step))
    found = [info.key for info in store.list(step_prefix(job, attempt, step))]
    for key in sorted(found, key=lambda key: rank_of(key) is None):
        store.delete(key)
    store.delete(manifest_key(job, attempt, step))


def jobs(store: ObjectStore) -> list[str]:
    """Return all jobs with objects in the store. Reads the complete listing. Raises Unavailable."""
    return sorted({found.key.split("/")[0] for found in store.list("") if _STEP.fullmatch(_directory(found.key))})


def _objects_of(store: ObjectStore, job: str) -> Iterator[tuple[CheckpointId, ObjectInfo]]:
    for found in store.list(f"{job}/"):
        directory = _STEP.fullmatch(_directory(found.key))
        if directory and found.key.count("/") == 2:  # other objects in the bucket are ignored
            yield CheckpointId(int(directory[1]), int(directory[2])), found


def _directory(key: str) -> str:
    return key.rpartition("/")[0].rpartition("/")[2]


def _step_objects(attempt: int, step: int, items: list[tuple[CheckpointId, ObjectInfo]]) -> StepObjects:
    objects = [info for _, info in items]
    return StepObjects(
        attempt=attempt,
        step=step,
        complete=any(info.key.endswith(f"/{MANIFEST_NAME}") for info in objects),
        ranks=_ranks(objects, _RANK_MANIFEST),
        objects=len(objects),
        size=sum(info.size for info in objects),
        updated_at=max(info.updated_at for info in objects),
        keys=tuple(info.key for info in objects),
        damaged=_ranks(objects, _DAMAGED),
    )


def _ranks(objects: Iterable[ObjectInfo], name: re.Pattern[str]) -> tuple[int, ...]:
    return tuple(sorted(rank for info in objects if (rank := rank_of(info.key, name)) is not None))
