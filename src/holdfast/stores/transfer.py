"""Verifies checkpoints in a store, and downloads them as shard files. Blocking, with bounded memory.

(The replicator's downloads are separate: they reuse shards of the node and resume after an interruption.)
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from holdfast.domain.errors import IntegrityError, NotFound, OutOfSpace
from holdfast.shards import Manifest, Span
from holdfast.shards.layout import PAGE
from holdfast.shards.manifest import sync_directory
from holdfast.stores.checksum import crc32c
from holdfast.stores.layout import CheckpointManifest, RankEntry, load_rank
from holdfast.stores.protocol import ObjectStore

PIECE_BYTES = 64 << 20  # in memory at a time while verifying
TRIES_MAX = 3  # reads of a piece that arrives damaged; damage in transfer does not recur, damage in the store does

Progress = Callable[[int], None]  # called with the number of further bytes done


def quiet(_nbytes: int) -> None:
    """A progress function that shows nothing."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A few adjacent spans with their checksums: bytes [`offset`, `offset` + `size`) of an object."""

    key: str
    offset: int  # offset in the object
    at: int  # offset in the shard file
    size: int
    spans: tuple[tuple[Span, int], ...]

    def check(self, data: memoryview) -> None:
        for span, expected in self.spans:
            start = span.offset - self.at
            if (found := crc32c(data[start : start + span.size])) != expected:
                raise IntegrityError(
                    f"{self.key} is corrupt in bytes {self.offset + start} to {self.offset + start + span.size}: "
                    f"checksum {found:08x} instead of {expected:08x}"
                )


@dataclass(frozen=True, slots=True)
class Damage:
    """An object that does not match the checkpoint, or is missing."""

    key: str
    problem: str
    rank: int  # rank whose shard contains the object


def pieces(entry: RankEntry, manifest: Manifest) -> Iterator[Piece]:
    """Yield the shard file of one rank as ranges of its objects."""
    spans = list(zip(manifest.spans, manifest.span_crc32c, strict=True))
    header = [each for each in spans if each[0].offset < PAGE]
    tensors = [each for each in spans if PAGE <= each[0].offset < manifest.tensors_end]
    extra = [each for each in spans if each[0].offset >= manifest.tensors_end]
    yield from _pieces(entry.rest, header, moved=0)
    yield from _pieces(entry.tensors, tensors, moved=-PAGE)
    yield from _pieces(entry.rest, extra, moved=PAGE - manifest.tensors_end)


def _pieces(key: str, spans: Sequence[tuple[Span, int]], moved: int) -> Iterator[Piece]:
    """Group the spans into pieces. `moved`: difference between an offset in the object and the offset in the file."""
    together: list[tuple[Span, int]] = []
    for each in (*spans, None):
        size = sum(span.size for span, _ in together)
        if together and (each is None or size + each[0].size > PIECE_BYTES):
            at = together[0][0].offset
            yield Piece(key, at + moved, at, size, tuple(together))
            together = []
        if each is not None:
            together.append(each)


# ---------------------------------------------------------------- verify


def bytes_to_verify(checkpoint: CheckpointManifest) -> int:
    shared = {entry.tensors: entry.tensors_size for entry in checkpoint.ranks}
    return sum(shared.values()) + sum(entry.rest_size for entry in checkpoint.ranks)


def verify(
    store: ObjectStore,
    checkpoint: CheckpointManifest,
    progress: Progress = quiet,
    *,
    ranks: Collection[int] | None = None,
) -> Iterator[Damage]:
    """Read every byte and compare checksums; objects that replicas have in common are read once. Raises Unavailable.

    With `ranks`, only their own objects, and the tensors that no lower rank has. The ranks of all nodes together cover every
    object once."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    first = {entry.tensors: entry.rank for entry in reversed(checkpoint.ranks)}
    seen: set[Piece] = set()
    for entry in checkpoint.ranks:
        if ranks is not None and entry.rank not in ranks:
            continue
        try:
            manifest = load_rank(store, checkpoint, entry.rank)
        except (IntegrityError, NotFound) as error:
            yield Damage(entry.manifest, str(error), entry.rank)
            continue
        damaged: set[str] = set()
        for piece in pieces(entry, manifest):
            if piece in seen or piece.key in damaged:  # one line per object suffices
                continue
            if ranks is not None and piece.key == entry.tensors and first[piece.key] != entry.rank:
                continue
            seen.add(piece)
            try:
                _read(store, piece, buffer[: piece.size])
            except (IntegrityError, NotFound) as error:
                damaged.add(piece.key)
                yield Damage(piece.key, str(error), entry.rank)
            progress(piece.size)


def _read(store: ObjectStore, piece: Piece, target: memoryview) -> None:
    """Read a piece. Raises IntegrityError if it repeatedly arrives damaged, NotFound, Unavailable."""
    tries = 1
    while True:
        store.read_into(piece.key, target, piece.offset)
        try:
            piece.check(target)
        except IntegrityError:
            if tries == TRIES_MAX:
                raise
            tries += 1
        else:
            return


# ---------------------------------------------------------------- fetch


def shard_path(directory: Path, checkpoint: CheckpointManifest, rank: int) -> Path:
    """Return the path of a shard, as in the disk tier and in a directory of checkpoints."""
    return directory / f"a{checkpoint.attempt}" / f"s{checkpoint.step}" / f"rank-{rank}.shard"


def fetch(
    store: ObjectStore,
    checkpoint: CheckpointManifest,
    ranks: Sequence[int],
    directory: Path,
    progress: Progress = quiet,
) -> list[Path]:
    """Download these ranks' shards as files below `directory`, each with its manifest, verified and durable.

    Objects that replicas have in common are downloaded once. Raises NotFound, IntegrityError, OutOfSpace, Unavailable; no
    incomplete shard remains."""
    paths: list[Path] = []
    at_home: dict[str, Path] = {}
    for rank in ranks:
        entry = checkpoint.entry(rank)
        path = shard_path(directory, checkpoint, rank)
        manifest = load_rank(store, checkpoint, rank)
        with _space_errors(path, entry.size):
            path.parent.mkdir(parents=True, exist_ok=True)
            _fetch_one(store, entry, manifest, path, at_home.get(entry.tensors), progress)
        at_home.setdefault(entry.tensors, path)
        paths.append(path)
    return paths


def _fetch_one(
    store: ObjectStore, entry: RankEntry, manifest: Manifest, path: Path, twin: Path | None, progress: Progress
) -> None:
    temporary = path.with_name(f".{path.name}.part")
    try:
        with temporary.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, manifest.size)
            with mmap.mmap(file.fileno(), manifest.size) as mapped, memoryview(mapped) as shard:
                for piece in pieces(entry, manifest):
                    with shard[piece.at : piece.at + piece.size] as target:
                        if not (twin and piece.key == entry.tensors and _copied(twin, piece, target)):
                            _read(store, piece, target)
                    progress(piece.size)
                mapped.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        manifest.write(path.with_suffix(".json"))
        sync_directory(path.parent.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _copied(twin: Path, piece: Piece, target: memoryview) -> bool:
    """Copy a piece from a shard that was just fetched. Returns False if it has changed; the piece is then read from the
    store."""
    with twin.open("rb", buffering=0) as file:
        file.seek(piece.at)
        if file.readinto(target) != piece.size:
            return False
    try:
        piece.check(target)
    except IntegrityError:
        return False
    return True


@contextmanager
def _space_errors(path: Path, size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OutOfSpace(f"no room for the {size} bytes of {path}") from error
