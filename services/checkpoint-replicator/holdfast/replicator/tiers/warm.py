"""Reuse of memory-tier files whose pages have already been allocated and faulted in.

Filling a new page costs ten times as much as filling an existing one, because the kernel must find, clear and map it. So a
shard file that is deleted from memory is moved to `.warm/`, still mapped, and reused for the next shard. Such files are freed
when memory gets short.

A file is reused only if no process reads it, which `flock` shows. Readers of a shard release their mapping before the lock.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.shards.pages import populate

DIRECTORY = ".warm"
SLACK_BYTES = 1 << 20  # the size of non-tensor state changes by a few bytes from save to save
LOSS_MAX = 2  # a larger file than this factor is not used
# Maximum part of the memory file system. The workers' images, two per rank, need the rest.
SHARE_MAX = 0.25  # part used by these files
FREE_MIN = 0.25  # part to leave free if a copy could also be stored on disk


@dataclass(slots=True)
class Pages:
    """A file, mapped for writing. `mapping` may be longer than the file. `touched`: all its pages are allocated."""

    fd: int  # a separate descriptor without a lock; shows whether the file still has a name
    mapping: mmap.mmap
    touched: bool = False

    def view(self, offset: int, size: int) -> memoryview:
        """Return a writable view. Raises OSError (ENOSPC) if memory is full."""
        if not self.touched:
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            try:
                if not populate(self.mapping, start, offset + size - start):
                    os.posix_fallocate(self.fd, offset, size)
            except OSError as error:
                if error.errno == errno.EFAULT:  # without populate, this would be a SIGBUS
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
                raise
        return memoryview(self.mapping)[offset : offset + size]


class WarmFiles:
    """The reusable files of a memory file system. `root` is the memory tier's directory. Thread-safe."""

    def __init__(self, root: Path) -> None:
        self._directory = root / DIRECTORY
        self._lock = threading.Lock()
        self._pages: dict[int, Pages] = {}  # by inode, which is not reused while the descriptor is open
        self._kept: dict[int, Path] = {}

    def sweep(self) -> None:
        """Delete the files of an earlier process, whose mappings no longer exist. Called at start."""
        shutil.rmtree(self._directory, ignore_errors=True)

    def pages(self, fd: int, size: int) -> Pages:
        """Return the pages of an open file, which is extended to `size` bytes. Raises OSError."""
        with self._lock:
            self._forget_unlinked()
            inode = os.fstat(fd).st_ino
            if inode not in self._pages:
                self._pages[inode] = _map(fd, size)
            return self._pages[inode]

    def reuse(self, path: Path, size: int) -> bool:
        """Turn a kept file into the file `path` with `size` bytes of any content. Returns False if no kept file fits or if
        `path` exists."""
        with self._lock:
            fitting = [inode for inode in self._kept if self._fits(inode, size)]
            if not fitting:
                return False
            inode = min(fitting, key=lambda inode: len(self._pages[inode].mapping))
            try:
                _resize(self._pages[inode].fd, size)
                os.link(self._kept[inode], path)  # unlike a rename, does not replace an existing file
            except OSError:  # no memory for the last page, or the path exists
                return False
            self._kept.pop(inode).unlink()
            return True

    def keep(self, path: Path) -> None:
        """Remove a file, keeping its pages if they can be reused."""
        with self._lock:
            self._forget_unlinked()
            with suppress(FileNotFoundError):
                if not self._keep(path):
                    path.unlink()

    def reserve(self, count: int, size: int) -> None:
        """Preallocate `count` files of `size` bytes, up to the memory limit. Raises OSError if memory is full."""
        for _ in range(count):
            with self._lock:
                ready = sum(self._fits(inode, size) for inode in self._kept)
                if ready >= count or not self._may_take(size):
                    return
            self._make(size)

    def _make(self, size: int) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f".{threading.get_native_id()}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            pages = self.pages(fd, size)
            pages.view(0, size).release()
            pages.touched = True
            self.keep(path)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def reservable(self, size: int) -> int:
        """Return how many files of `size` bytes the memory limit allows, regardless of the memory that is free now."""
        whole, _ = self._space()
        return int(SHARE_MAX * whole) // _mapped(size)

    def has_room(self, size: int) -> bool:
        """Whether there is room for a copy that could also be stored on disk."""
        with self._lock:
            self._forget_unlinked()
            return any(self._fits(inode, size) for inode in self._kept) or self._may_take(size)

    def give_back(self) -> None:
        """Free the kept files."""
        with self._lock:
            while self._kept:
                _, path = self._kept.popitem()
                path.unlink(missing_ok=True)
            self._forget_unlinked()

    def _fits(self, inode: int, size: int) -> bool:
        return size <= len(self._pages[inode].mapping) <= LOSS_MAX * size + SLACK_BYTES

    def _may_take(self, size: int) -> bool:
        whole, free = self._space()
        used = sum(len(pages.mapping) for pages in self._pages.values())
        return used + size <= SHARE_MAX * whole and free - size >= FREE_MIN * whole

    def _space(self) -> tuple[int, int]:
        """Return (total, free) bytes of the memory file system."""
        stat = os.statvfs(self._directory.parent)
        return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize

    def _keep(self, path: Path) -> bool:
        """Move a file to the kept ones. Returns False if it cannot be reused. Raises FileNotFoundError."""
        inode = path.stat().st_ino
        pages = self._pages.get(inode)
        if pages is None or not pages.touched:
            return False
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False  # a process reads it, so its pages cannot be reused
            os.fchmod(file.fileno(), 0o600)  # it may have been lent to the workers of a job
            self._directory.mkdir(parents=True, exist_ok=True)
            self._kept[inode] = self._directory / str(inode)
            path.rename(self._kept[inode])
        return True

    def _forget_unlinked(self) -> None:
        """Drop the mappings of deleted files, because a mapping keeps their memory allocated."""
        for inode, pages in list(self._pages.items()):
            if not os.fstat(pages.fd).st_nlink:
                os.close(pages.fd)
                del self._pages[inode]  # the last view releases the mapping


def _mapped(size: int) -> int:
    """Return the mapped bytes of a file of `size` bytes, which include room to grow."""
    return -(-(size + SLACK_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE


def _map(fd: int, size: int) -> Pages:
    # The lock must be of another open file description.
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        room = _mapped(size)
        os.ftruncate(other, room)  # only until it is mapped
        mapping = mmap.mmap(other, room)
        os.ftruncate(other, size)
    except BaseException:
        os.close(other)
        raise
    return Pages(other, mapping)


def _resize(fd: int, size: int) -> None:
    """Resize to exactly `size` bytes and allocate all of them, because a write to a hole of a full file system causes
    SIGBUS."""
    before = os.fstat(fd).st_size
    if size > before:
        os.posix_fallocate(fd, before, size - before)
    os.ftruncate(fd, size)
