"""An incomplete shard file: under a name that is not listed, claimed by one writer, with its space reserved."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from holdfast.domain.errors import Conflict, OutOfSpace
from holdfast.replicator.tiers.warm import Pages, WarmFiles
from holdfast.shards import CHUNK_BYTES, Manifest, Span
from holdfast.shards.manifest import temporary_of
from holdfast.shards.opening import move_aside

PAGE = 4096
# O_DIRECT is about 6× as fast as buffered writes with fsync for large files, and does not displace the training job's
# page cache. Small files use the cache, from which a restore reads them.
DIRECT_BYTES_MIN = 16 << 20
WRITERS = 2  # a second write in the queue keeps the disk busy


class Arriving(Conflict):
    """Another transfer is writing the same file."""


class Part:
    """Space for `size` bytes that will become the file `path`. `store` and `place` may be called from several threads.

    A transfer resumes only a file with the same `tag`; `found` is whether there was one. `warm`: the file is in memory, and a
    reusable file is taken if one fits. On disk, space is allocated first. In memory, the allocation would take half as long as
    the transfer, so the free space is checked first and allocated piece by piece. The manifest's space is always allocated
    first. Raises OutOfSpace before the first byte, and Arriving if another transfer is writing the file.
    """

    def __init__(self, path: Path, size: int, tag: str, *, what: str, warm: WarmFiles | None = None) -> None:
        self.path = path
        self.size = size
        self._what = what  # for messages
        self._warm = warm
        self._pages: Pages | None = None
        self._buffers: list[memoryview] = []  # reusable buffers for a file on disk
        self._part = path.with_name(f".{path.name}.{tag}.part")
        self._direct = -1
        again = warm is not None and warm.reuse(self._part, size)
        self._fd = _open_part(self._part)
        try:
            self._claim()
            self.found = not again and os.fstat(self._fd).st_size > 0
            self._make_room()
            if warm is not None:
                self._pages = warm.pages(self._fd, size)
            elif size >= DIRECT_BYTES_MIN:
                self._direct = _open_direct(self._part)
        except BaseException:
            self.close()
            raise
        self._direct_works = self._direct >= 0

    def read(self, size: int, offset: int) -> bytes:
        return os.pread(self._fd, size, offset)

    def store(self, data: memoryview, offset: int) -> None:
        """Write `data`. Raises OutOfSpace, OSError."""
        with full_is_out_of_space(self.path, self.size):
            if self._pages is not None and not self._pages.touched:
                os.posix_fallocate(self._fd, offset, len(data))  # a third faster than page faults in the write
            self._write(data, offset)

    @contextmanager
    def place(self, span: Span) -> Iterator[memoryview]:
        """Yield a buffer for a span, which is stored at the end of the block. In memory it is the file's mapping, without a
        copy. Raises as `store` does."""
        if self._pages is None:
            try:
                buffer = self._buffers.pop()
            except IndexError:
                buffer = aligned_buffer()
            yield buffer[: span.size]
            self.store(buffer[: span.size], span.offset)
            self._buffers.append(buffer)
            return
        with full_is_out_of_space(self.path, self.size):
            view = self._pages.view(span.offset, span.size)
        yield view

    def store_all(self, data: memoryview, spans: Iterable[Span], pace: Callable[[int], None]) -> None:
        """Store the given spans of `data`. `pace(nbytes)` is called before each."""

        def one(span: Span) -> None:
            pace(span.size)
            self.store(data[span.offset : span.offset + span.size], span.offset)

        with ThreadPoolExecutor(WRITERS, "write") as writers:
            # Threads inherit the priority of the thread that starts them.
            stored = [writers.submit(one, span) for span in spans]
            try:
                for each in stored:
                    each.result()
            finally:
                writers.shutdown(cancel_futures=True)

    def publish(self, manifest: Manifest) -> Path:
        """Commit: fsync, rename, manifest. The shard is listed from now on."""
        with full_is_out_of_space(self.path, self.size):
            os.fsync(self._fd)
            if self.path.is_dir():  # a rename cannot replace a directory
                move_aside(self.path)
            self._part.rename(self.path)
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # before it is listed, so that readers can open it immediately
            if self._pages is not None:
                self._pages.touched = True
            manifest.write(manifest_path(self.path))  # this fsync of the directory covers both renames
        return self.path

    def discard(self) -> None:
        """Delete the file, so that it cannot be resumed."""
        self._part.unlink(missing_ok=True)
        temporary_of(manifest_path(self.path)).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the descriptors. The file is kept."""
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1

    def _claim(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Arriving(f"another transfer is writing {self._what} on this node") from error
        if not self._part.exists() or self._part.stat().st_ino != os.fstat(self._fd).st_ino:
            raise Arriving(f"another transfer has just written {self._what} on this node")

    def _make_room(self) -> None:
        with full_is_out_of_space(self.path, self.size):
            Manifest.reserve(manifest_path(self.path), self.size)
        if self._warm is None:
            _allocate(self._fd, self.path, self.size)
            return
        if self._missing() > 0:
            self._warm.give_back()
        if self._missing() > 0:
            raise no_room(self.path, self.size)
        os.ftruncate(self._fd, self.size)

    def _missing(self) -> int:
        """Return how many bytes the file system lacks; 0 or less if there is enough space."""
        found, free = os.fstat(self._fd), os.fstatvfs(self._fd)
        return self.size - found.st_blocks * 512 - free.f_bavail * free.f_frsize

    def _write(self, data: memoryview, offset: int) -> None:
        if self._direct_works and len(data) % PAGE == 0 and offset % PAGE == 0:
            try:
                _write_all(self._direct, data, offset)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # A device whose blocks are larger than a page: continue without O_DIRECT.
                self._direct_works = False  # the descriptor stays open, because another thread may use it
        _write_all(self._fd, data, offset)


def aligned_buffer() -> memoryview:
    """Return a page-aligned buffer of one span, as O_DIRECT requires."""
    return memoryview(mmap.mmap(-1, CHUNK_BYTES))


def manifest_path(shard: Path) -> Path:
    return shard.with_suffix(".json")


def _open_part(path: Path) -> int:
    """Open or create the file. An object of another type is renamed. Raises OSError."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        move_aside(path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _allocate(fd: int, path: Path, size: int) -> None:
    try:
        with full_is_out_of_space(path, size):
            os.posix_fallocate(fd, 0, size)
            os.ftruncate(fd, size)
    except OSError as error:
        # A file system without fallocate returns EOPNOTSUPP; the write then fails if there is no space.
        if error.errno != errno.EOPNOTSUPP:
            raise


def _open_direct(path: Path) -> int:
    """Open a second descriptor that bypasses the page cache; -1 if the file system does not support it."""
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


@contextmanager
def full_is_out_of_space(path: Path, size: int) -> Iterator[None]:
    """Convert an OSError of a full file system to OutOfSpace with the sizes. Other errors are not changed."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise no_room(path, size) from error
        raise


def no_room(path: Path, size: int) -> OutOfSpace:
    directory = next(parent for parent in path.parents if parent.exists())
    stat = os.statvfs(directory)
    return OutOfSpace(f"no room for {size} bytes at {path}: {stat.f_bavail * stat.f_frsize} bytes are free there")
