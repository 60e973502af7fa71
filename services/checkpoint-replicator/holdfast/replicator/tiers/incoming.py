"""A shard file on its way in: verified as it arrives, resumable, visible only when it is whole.

    source ──► check (caller's thread) ──► write (a thread of its own)

so that a span is checked while the one before it is on its way to the disk; whoever reads from a network puts a third thread
in front. A few spans are in memory at a time, not more.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from holdfast.domain.errors import Conflict, IntegrityError, OutOfSpace
from holdfast.replicator.checksum import crc32c
from holdfast.replicator.names import label
from holdfast.shards import CHUNK_BYTES, Manifest

PAGE = 4096
# O_DIRECT is about 6× as fast as buffered writing and fsync for bulk, and does not flush the page cache of the training
# job; small files are better off with the cache: whoever restores them next finds them there.
DIRECT_BYTES_MIN = 16 << 20
WRITES_AHEAD = 2  # spans checked and not yet written


class Incoming:
    """A shard on its way in: spans are verified as they arrive, in order, and only a whole one can be committed.

    `next_span` is where to go on: spans that an interrupted transfer of the same bytes left are found and kept. `reserve`: take
    all of the space at once. On a memory file system that takes as long as half the transfer, so there it is only looked at
    whether there is enough, and taken span by span.
    """

    def __init__(self, path: Path, manifest: Manifest, *, reserve: bool = True) -> None:
        self.manifest = manifest
        self._path = path
        self._reserve = reserve
        # The checksum in the name: only a transfer of the same bytes may go on with what it finds.
        self._part = path.with_name(f".{path.name}.{manifest.crc32c:08x}.part")
        self._direct = -1
        self._fd = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._claim()
            self._make_room()
            self.next_span = self._verified_before()
            if manifest.size >= DIRECT_BYTES_MIN:
                self._direct = _open_direct(self._part)
        except BaseException:
            self.close()
            raise

    def write(self, data: memoryview) -> None:
        """The next span. Raises IntegrityError when it is not what the manifest says; it is not counted then."""
        self._check(self.next_span, data)
        self._store_span(self.next_span, data)

    def write_all(self, contents: Iterable[memoryview]) -> None:
        """The next spans, one after the other; raises as `write` does, and what was good before stays counted.

        A content has to stay as it is until `WRITES_AHEAD` + 1 later ones have been asked for.
        """
        waiting: deque[Future[None]] = deque()
        with ThreadPoolExecutor(1, "write") as writer:  # it has the priority of the thread that starts it
            for number, data in enumerate(contents, self.next_span):
                self._check(number, data)
                if len(waiting) == WRITES_AHEAD:
                    waiting.popleft().result()
                waiting.append(writer.submit(self._store_span, number, data))
            for write in waiting:
                write.result()

    def commit(self) -> Path:
        """fsync → rename → manifest. From here on the shard is listed."""
        if self.next_span != len(self.manifest.spans):
            raise Conflict(f"{label(self.manifest.key)} is not complete: commit() came too early")
        try:
            os.fsync(self._fd)
            self._part.rename(self._path)
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # before it is listed: whoever finds it may open it at once
            self.manifest.write(manifest_path(self._path))  # its directory fsync covers both renames
        except OSError as error:
            raise out_of_space(error, self._path, self.manifest.size) from error
        return self._path

    def close(self) -> None:
        """Keeps what has arrived, for a resumption; a committed shard stays committed."""
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1

    def _check(self, number: int, data: memoryview) -> None:
        span = self.manifest.spans[number]
        if len(data) != span.size or crc32c(data) != self.manifest.span_crc32c[number]:
            raise IntegrityError(
                f"{label(self.manifest.key)}: bytes {span.offset} to {span.offset + span.size} arrived damaged"
            )

    def _store_span(self, number: int, data: memoryview) -> None:
        offset = self.manifest.spans[number].offset
        try:
            if not self._reserve:
                os.posix_fallocate(self._fd, offset, len(data))  # a third faster than letting the write find new pages
            self._store(data, offset)
        except OSError as error:
            raise out_of_space(error, self._path, self.manifest.size) from error
        self.next_span = number + 1

    def _make_room(self) -> None:
        """Raises OutOfSpace before the first byte."""
        if self._reserve:
            _allocate(self._fd, self._path, self.manifest.size)
            return
        found, free = os.fstat(self._fd), os.fstatvfs(self._fd)
        if free.f_bavail * free.f_frsize + found.st_blocks * 512 < self.manifest.size:
            raise out_of_space(OSError(errno.ENOSPC, "no space left"), self._path, self.manifest.size)
        os.ftruncate(self._fd, self.manifest.size)

    def _store(self, data: memoryview, offset: int) -> None:
        if self._direct >= 0 and len(data) % PAGE == 0 and offset % PAGE == 0:
            try:
                _write_all(self._direct, data, offset)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:  # a device with larger blocks than a page: go on without
                    raise
                os.close(self._direct)
                self._direct = -1
        _write_all(self._fd, data, offset)

    def _claim(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Conflict(f"{label(self.manifest.key)} is already arriving here") from error
        if not self._part.exists() or self._part.stat().st_ino != os.fstat(self._fd).st_ino:
            raise Conflict(f"{label(self.manifest.key)} has just arrived here by another way")

    def _verified_before(self) -> int:
        """How many spans an interrupted transfer has left here, checked byte by byte."""
        for index, (span, expected) in enumerate(zip(self.manifest.spans, self.manifest.span_crc32c, strict=True)):
            if crc32c(os.pread(self._fd, span.size, span.offset)) != expected:
                return index
        return len(self.manifest.spans)


def manifest_path(shard: Path) -> Path:
    return shard.with_suffix(".json")


def aligned_buffer() -> memoryview:
    """A page-aligned buffer of one span, as O_DIRECT wants it."""
    return memoryview(mmap.mmap(-1, CHUNK_BYTES))


def _allocate(fd: int, path: Path, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
        os.ftruncate(fd, size)
    except OSError as error:
        # A file system without fallocate answers EOPNOTSUPP: writing will tell.
        if error.errno != errno.EOPNOTSUPP:
            raise out_of_space(error, path, size) from error


def _open_direct(path: Path) -> int:
    """A second descriptor that bypasses the page cache; -1 where the file system does not know how."""
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return -1


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def out_of_space(error: OSError, path: Path, size: int) -> Exception:
    """`error`, or OutOfSpace with numbers when that is what it is."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    directory = next(parent for parent in path.parents if parent.exists())
    stat = os.statvfs(directory)
    return OutOfSpace(f"no room for {size} bytes at {path}: {stat.f_bavail * stat.f_frsize} bytes are free there")
