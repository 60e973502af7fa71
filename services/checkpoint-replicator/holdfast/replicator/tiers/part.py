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
# O_DIRECT is about 6× as fast as buffered writing and fsync for bulk, and does not flush the page cache of the training
# job; small files are better off with the cache: whoever restores them next finds them there.
DIRECT_BYTES_MIN = 16 << 20
WRITERS = 2  # a disk that has one write waiting behind the other is never idle in between


class Arriving(Conflict):
    """Somebody else is bringing the same file in."""


class Part:
    """Space for `size` bytes that will be the file `path`; `store` and `place` may be called by several threads.

    `tag` tells apart what may go on with what it finds; `found` says whether there was something. `warm`: in memory, in a file
    of these if one fits. Space is taken at once; in memory that takes as long as half the transfer, so there it is only looked
    at whether there is enough, and taken piece by piece. The manifest's is taken at once everywhere. Raises OutOfSpace before
    the first byte, Arriving when another is at it.
    """

    def __init__(self, path: Path, size: int, tag: str, *, what: str, warm: WarmFiles | None = None) -> None:
        self.path = path
        self.size = size
        self._what = what  # for errors
        self._warm = warm
        self._pages: Pages | None = None
        self._buffers: list[memoryview] = []  # of a disk's, free to be used again
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
        """Raises OutOfSpace, OSError."""
        try:
            if self._pages is not None and not self._pages.touched:
                os.posix_fallocate(self._fd, offset, len(data))  # a third faster than letting the write find new pages
            self._write(data, offset)
        except OSError as error:
            raise out_of_space(error, self.path, self.size) from error

    @contextmanager
    def place(self, span: Span) -> Iterator[memoryview]:
        """Where to put these bytes; they are stored when that has gone well. In memory that is where they stay, and no copy.
        Raises as `store` does."""
        if self._pages is None:
            try:
                buffer = self._buffers.pop()
            except IndexError:
                buffer = aligned_buffer()
            yield buffer[: span.size]
            self.store(buffer[: span.size], span.offset)
            self._buffers.append(buffer)
            return
        try:
            view = self._pages.view(span.offset, span.size)
        except OSError as error:
            raise out_of_space(error, self.path, self.size) from error
        yield view

    def store_all(self, data: memoryview, spans: Iterable[Span], pace: Callable[[int], None]) -> None:
        """All of these pieces of `data`, each at its place. `pace(nbytes)` is called before each."""

        def one(span: Span) -> None:
            pace(span.size)
            self.store(data[span.offset : span.offset + span.size], span.offset)

        with ThreadPoolExecutor(WRITERS, "write") as writers:  # they have the priority of the thread that starts them
            stored = [writers.submit(one, span) for span in spans]
            try:
                for each in stored:
                    each.result()
            finally:
                writers.shutdown(cancel_futures=True)

    def publish(self, manifest: Manifest) -> Path:
        """fsync → rename → manifest. From here on the shard is listed."""
        try:
            os.fsync(self._fd)
            if self.path.is_dir():  # whoever made it: a rename cannot take its place
                move_aside(self.path)
            self._part.rename(self.path)
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # before it is listed: whoever finds it may open it at once
            if self._pages is not None:
                self._pages.touched = True
            manifest.write(manifest_path(self.path))  # its directory fsync covers both renames
        except OSError as error:
            raise out_of_space(error, self.path, self.size) from error
        return self.path

    def discard(self) -> None:
        """Nobody can go on with it."""
        self._part.unlink(missing_ok=True)
        temporary_of(manifest_path(self.path)).unlink(missing_ok=True)

    def close(self) -> None:
        """Keeps what is there; what has been published stays published."""
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1

    def _claim(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Arriving(f"{self._what} is already arriving here") from error
        if not self._part.exists() or self._part.stat().st_ino != os.fstat(self._fd).st_ino:
            raise Arriving(f"{self._what} has just arrived here by another way")

    def _make_room(self) -> None:
        try:
            Manifest.reserve(manifest_path(self.path), self.size)
        except OSError as error:
            raise out_of_space(error, self.path, self.size) from error
        if self._warm is None:
            _allocate(self._fd, self.path, self.size)
            return
        if self._missing() > 0:
            self._warm.give_back()
        if self._missing() > 0:
            raise out_of_space(OSError(errno.ENOSPC, "no space left"), self.path, self.size)
        os.ftruncate(self._fd, self.size)

    def _missing(self) -> int:
        """Bytes that the file system is short of; none when not above 0."""
        found, free = os.fstat(self._fd), os.fstatvfs(self._fd)
        return self.size - found.st_blocks * 512 - free.f_bavail * free.f_frsize

    def _write(self, data: memoryview, offset: int) -> None:
        if self._direct_works and len(data) % PAGE == 0 and offset % PAGE == 0:
            try:
                _write_all(self._direct, data, offset)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:  # a device with larger blocks than a page: go on without
                    raise
                self._direct_works = False  # the descriptor stays open: another thread may be using it
        _write_all(self._fd, data, offset)


def aligned_buffer() -> memoryview:
    """A page-aligned buffer of one span, as O_DIRECT wants it."""
    return memoryview(mmap.mmap(-1, CHUNK_BYTES))


def manifest_path(shard: Path) -> Path:
    return shard.with_suffix(".json")


def _open_part(path: Path) -> int:
    """The file, new if there is none; what is no file is moved aside. Raises OSError."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        move_aside(path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


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
