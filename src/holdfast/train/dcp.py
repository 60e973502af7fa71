"""Shards as a checkpoint of `torch.distributed.checkpoint` (DCP), for its planner and for users with torch alone.

The slot of every tensor in a shard has the format of `torch.save`, so DCP can read shard files directly. It also needs the
index of the complete checkpoint, `.metadata`, a pickle, which this module creates from the indices of the shards and never
reads from another source. Names are those that DCP's default planner gives to the same nested dict.

Non-tensor state is in the extra part of each shard. `export` writes it to a separate file, from the first shard that has it.
The states of the random number generators, which differ by rank, are omitted."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from holdfast.domain.errors import Conflict, OutOfSpace
from holdfast.shards import CHUNK_BYTES, Reader, sync_directory
from holdfast.train.dcp_contents import Contents
from holdfast.train.dcp_reader import ShardReader, open_shards

__all__ = ["ShardReader", "export", "metadata"]

METADATA = ".metadata"
VALUES = "__values.distcp"  # what is no tensor
# A hard link that cannot be made where a copy can: another file system, too many links, one that knows no links.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)

Progress = Callable[[int, int], None]  # bytes done, bytes in all


def metadata(shards: Sequence[Reader]) -> Metadata:
    """DCP's index of open shards, each under its file's name; what is no tensor is at its place in `VALUES`, which `export`
    writes. Raises IntegrityError when the shards are of different steps, InvalidSpec when a name means two things."""
    return _index(Contents.of(shards), shards, [shard.path.name for shard in shards])


def export(shards: Sequence[Path], directory: Path, *, progress: Progress | None = None) -> None:
    """Make `directory` a plain DCP checkpoint of the shards of one step: those of every rank whose pieces are wanted.

    Files are linked where that is possible, else copied; `.metadata` comes last, and without it nothing is there. Bytes
    are checked against the manifest beside a shard, where there is one.

    Raises Conflict when the directory already holds a checkpoint, IntegrityError when a shard is damaged or of another
    step or when together they do not cover the state, InvalidSpec when one name means two things (pipeline stages that
    name their layers alike), OutOfSpace. What was written is removed then.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if (directory / METADATA).exists():
        raise Conflict(f"{directory} already holds a checkpoint: choose another directory")
    with open_shards(shards, verify=True) as opened, _undone_unless_finished() as written:
        contents = Contents.of(opened)
        contents.require_whole(opened)
        names = [f"__{number}_0.distcp" for number in range(len(opened))]
        total = sum(shard.header.size for shard in opened)
        done = 0
        for shard, name in zip(opened, names, strict=True):
            written.append(directory / name)
            for size in _place(shard, directory / name):
                done += size
                if progress is not None:
                    progress(done, total)
        _write(directory / VALUES, b"".join(contents.values.values()), written)
        sync_directory(directory)
        index = pickle.dumps(_index(contents, opened, names))
        _write(directory / f"{METADATA}.tmp", index, written)
        (directory / f"{METADATA}.tmp").rename(directory / METADATA)
        sync_directory(directory)


def _index(contents: Contents, shards: Sequence[Reader], files: Sequence[str]) -> Metadata:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {**contents.tensors}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for index, (number, name) in contents.slots.items():
        slot = shards[number].slot(name)
        storage[index] = _StorageInfo(files[number], slot.offset, slot.length)
    offset = 0
    for name, raw in contents.values.items():
        entries[name] = BytesStorageMetadata()
        storage[MetadataIndex(name)] = _StorageInfo(VALUES, offset, len(raw))
        offset += len(raw)
    return Metadata(entries, planner_data=dict(contents.paths), storage_data=storage)


def _place(shard: Reader, path: Path) -> Iterator[int]:
    """Link or copy one shard; yields the bytes that have come about. An image is copied: it will be written again."""
    if shard.path.suffix != ".image":
        try:
            os.link(shard.path, path)
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
        else:
            yield shard.header.size
            return
    with path.open("xb") as file, _space(path, shard.header.size):
        for offset in range(0, shard.header.size, CHUNK_BYTES):
            piece = shard.data[offset : offset + CHUNK_BYTES]
            file.write(piece)
            yield len(piece)
        file.flush()
        os.fsync(file.fileno())


def _write(path: Path, raw: bytes, written: list[Path]) -> None:
    written.append(path)
    with path.open("wb") as file, _space(path, len(raw)):
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _space(path: Path, size: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        stat = os.statvfs(path.parent)
        raise OutOfSpace(
            f"no room for {size} bytes at {path}: {stat.f_bavail * stat.f_frsize} bytes are free"
        ) from error


@contextmanager
def _undone_unless_finished() -> Iterator[list[Path]]:
    written: list[Path] = []
    try:
        yield written
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
