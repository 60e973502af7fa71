"""Injects faults of a node's storage: a full disk, and one flipped bit in a stored checkpoint.

The file that fills the disk has a fixed name, so the next agent can delete a file that an earlier agent has left. A bit is
flipped only in a committed shard. A bit that flips before the commit is a fault of the sender's memory, which no checksum can
detect.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Final

from holdfast.domain.errors import Conflict, HoldfastError
from holdfast.shards import Manifest
from holdfast.shards.layout import PAGE

FILLER: Final = ".filled-by-holdfast-inject"  # in the directory of the disk tier, next to the jobs' directories
CHUNK_BYTES: Final = 256 * 2**20
CHUNK_BYTES_MIN: Final = 4096
_TRIES: Final = 20
_GIB: Final = 2**30


def require_fillable(directory: Path, bytes_max: int) -> None:
    """Raises `Conflict` if more than `bytes_max` bytes are free in the file system of `directory`, or if it is being filled."""
    if (directory / FILLER).exists():
        raise Conflict(f"{directory} is being filled by another injected fault")
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise Conflict(f"{directory} cannot be filled: {error.strerror}") from error
    if free > bytes_max:
        raise Conflict(
            f"{free / _GIB:.1f} GiB are free in {directory}, more than the {bytes_max / _GIB:g} GiB that an injected fault "
            "may fill (HOLDFAST_FAULT_FILL_GIB_MAX of the agent)"
        )


def fill(directory: Path, bytes_max: int) -> int:
    """Extend the file until the file system is full. Returns the size of the file. Blocks during the allocation."""
    with (directory / FILLER).open("ab", buffering=0) as file:
        size, chunk = file.tell(), CHUNK_BYTES
        while (chunk := min(chunk, bytes_max - size)) >= CHUNK_BYTES_MIN:
            try:
                os.posix_fallocate(file.fileno(), size, chunk)
                size += chunk
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                chunk //= 2
        return size


def remove_filler(directory: Path) -> bool:
    """Delete the file that fills the disk. Returns whether there was one."""
    path = directory / FILLER
    existed = path.exists()
    path.unlink(missing_ok=True)
    return existed


def flip_bit(disk: Path, memory: Path, job: str, rank: int, chance: random.Random) -> str:
    """Flip one bit of a stored shard of the job: the newest shard of `rank` if there is one. Shards on disk precede copies of
    other nodes in memory. Returns a description. Raises `Conflict` if no shard of the job is stored on this node."""
    for _ in range(_TRIES):  # retention may delete the shard at the same time
        path = _stored(disk / job, rank) or _stored(memory / job / "staged", rank)
        if path is None:
            raise Conflict(f"no checkpoint of {job} is stored on this node yet, so no bit can be flipped")
        try:
            return _flip(path, chance)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise Conflict(f"{path} cannot be written: {error.strerror}") from error
    raise Conflict(f"the stored checkpoints of {job} are deleted faster than a bit can be flipped")


def _stored(directory: Path, rank: int) -> Path | None:
    """Return the newest committed shard, with preference for shards of `rank`."""
    found: list[tuple[bool, int, int, Path]] = []
    for path in directory.glob("a*/s*/rank-*.shard"):
        try:
            key = Manifest.read(path.with_suffix(".json")).key
        except (OSError, HoldfastError):
            continue  # not committed, or deleted since the listing
        found.append((key.rank == rank, key.attempt, key.step, path))
    return max(found)[-1] if found else None


def _flip(path: Path, chance: random.Random) -> str:
    """Flip a random bit after the header page."""
    with path.open("r+b") as file:
        size = os.fstat(file.fileno()).st_size
        at, bit = chance.randrange(min(PAGE, size - 1), size), chance.randrange(8)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))
    return f"bit {bit} of byte {at} of {path} flipped"
