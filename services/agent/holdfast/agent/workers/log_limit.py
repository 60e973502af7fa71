"""The size limit of worker logs: the first and the last part stay, the middle is cut, and the log says so where it was cut.

    0 ─ first part ─ head ─ note ─ hole ··· ─ size-tail ─ last part ─ size     the writer appends at the end, as before

A hole is punched into the file (fallocate), which needs no cooperation of the writer, keeps all offsets, and frees the blocks.
Where the file system has no holes, the file is emptied, and begins again with the note and its last output.

The limit is generous, because nothing of the user's is deleted unasked. Near a full disk a much smaller one applies, to the
logs of all generations on the node: a script that prints without end would otherwise stop every job there."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

LOG_BYTES_MAX = 1 << 30  # on disk per rank; output between two checks may exceed it
LOG_BYTES_MIN = 1 << 20  # smallest limit that can be configured
SCARCE_LOG_BYTES_MAX = 64 << 20  # … while the file system lacks room
SCARCE_SHARE, SCARCE_BYTES = 0.05, 10 << 30  # the file system lacks room below this share of it, or so many bytes
FIRST_SHARE = 16  # the first part is a sixteenth of the limit
EMPTIED_KEEPS_BYTES = 1 << 20  # of the last output, where the file system has no holes
SETTING = "HOLDFAST_LOG_BYTES_MAX"

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 0x01, 0x02
_BLOCK_BYTES = 512  # the unit of st_blocks, independent of the file system's block size
_PAGE_BYTES = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True, slots=True)
class Limit:
    """`bytes_max` of each log on disk; 0 = none. `why`: completes "the limit is …"."""

    bytes_max: int
    why: str
    scarce: bool = False


def limit_of(bytes_max: int, *, total: int, free: int) -> Limit:
    """The limit that applies now. `bytes_max`: the configured one, 0 = none. `total`, `free`: bytes of the file system."""
    if free < min(SCARCE_SHARE * total, SCARCE_BYTES) and not 0 < bytes_max <= SCARCE_LOG_BYTES_MAX:
        why = f"{_size(SCARCE_LOG_BYTES_MAX)} per rank while the disk has only {_size(free)} free"
        return Limit(SCARCE_LOG_BYTES_MAX, why, scarce=True)
    return Limit(bytes_max, f"{_size(bytes_max)} per rank ({SETTING})")


def limit_here(directory: Path, bytes_max: int) -> Limit:
    """`limit_of` for the file system of a directory. Raises OSError."""
    usage = shutil.disk_usage(directory)
    return limit_of(bytes_max, total=usage.total, free=usage.free)


def cut(path: Path, limit: Limit) -> int:
    """Cut the middle of a log that exceeds its limit. Returns the number of bytes freed. Raises OSError."""
    if not limit.bytes_max:
        return 0
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return 0
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):  # the script can write to the directory
            return 0
        held = status.st_blocks * _BLOCK_BYTES
        if held <= limit.bytes_max:
            return 0
        # Never behind an earlier hole, whose beginning may have been chosen by a smaller limit.
        first = min(_whole_pages(limit.bytes_max // FIRST_SHARE), _whole_pages(os.lseek(fd, 0, os.SEEK_HOLE)))
        end = _whole_pages(status.st_size - (limit.bytes_max // 2 - first))
        if end <= first + _PAGE_BYTES:
            return 0  # a file whose blocks are not those of its content
        if _punch(fd, first, end - first):
            os.pwrite(fd, note(end - first, limit), first)
        else:
            _empty(fd, path, status.st_size, limit)
        return max(0, held - os.fstat(fd).st_blocks * _BLOCK_BYTES)
    finally:
        os.close(fd)


def note(cut_bytes: int, limit: Limit) -> bytes:
    """The line that stands in the place of what was cut."""
    at = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"\n[holdfast] {_size(cut_bytes)} of output were cut here until {at}: the limit is {limit.why}\n".encode()


def _empty(fd: int, path: Path, size: int, limit: Limit) -> None:
    """Begin the file again. What the writer appends between the read and the end of this function may be lost."""
    kept_bytes = min(EMPTIED_KEEPS_BYTES, limit.bytes_max // 4)
    last = os.pread(fd, kept_bytes, max(0, size - kept_bytes))
    os.ftruncate(fd, 0)  # the writer appends, so it continues at the new end
    with path.open("ab", buffering=0) as file:
        file.write(note(size - len(last), limit) + last)


def _punch(fd: int, offset: int, length: int) -> bool:
    """Free these bytes. Returns False if the file system does not support it."""
    if _libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE | _FALLOC_FL_PUNCH_HOLE, offset, length) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code))


def _whole_pages(size: int) -> int:
    return max(0, size) // _PAGE_BYTES * _PAGE_BYTES


def _size(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.1f} MiB"
