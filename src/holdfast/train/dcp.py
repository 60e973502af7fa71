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
from holdfast.train.saves.dcp_contents import Contents
from holdfast.train.saves.dcp_reader import ShardReader, open_shards

__all__ = ["ShardReader", "export", "metadata"]

METADATA = ".metadata"
VALUES = "__values.distcp"  # non-tensor state
# A hard link fails but a copy works: another file system, too many links, or a file system without links.
_NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS)

Progress = Callable[[int, int], None]  # bytes done, total bytes


def metadata(shards: Sequence[Reader]) -> Metadata:
    """Return DCP's index of open shards, each under its file's name; non-tensor values refer to `VALUES`, which `export`
    writes. Raises IntegrityError if the shards are of different steps, and InvalidSpec if one name has two meanings."""
    return _index(Contents.of(shards), shards, [shard.path.name for shard in shards])


def export(shards: Sequence[Path], directory: Path, *, progress: Progress | None = None) -> None:
    """Make `directory` a plain DCP checkpoint of the shards of one step.

    Files are linked if possible, otherwise copied. `.metadata` is written last and commits the checkpoint. Bytes are
    verified if there is a manifest next to the shard.

    Raises Conflict if the directory already contains a checkpoint; IntegrityError if a shard is damaged or of another
    step, or if the shards do not cover the state; InvalidSpec if one name has two meanings (pipeline stages that give
    their layers the same names); OutOfSpace. After an error, the written files are deleted.
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
    """Link or copy one shard; yields the number of bytes as they are written. An image is copied, because a later save
    overwrites it."""
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
