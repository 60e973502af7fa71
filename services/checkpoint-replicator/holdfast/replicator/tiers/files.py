"""Shards as files: `<root>/<job>/a<attempt>/s<step>/rank-<r>.shard` and its manifest `….json`. The disk tier, and (under
`staged/` of the memory directory) the shards that were fetched for a restore.

Commit: the shard under a temporary name, written, fsynced, renamed; then the manifest in the same way. A crash before the
last rename leaves files that nobody lists and that the next start sweeps away.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.domain.errors import Conflict, HoldfastError, IntegrityError, NotFound, OutOfSpace
from holdfast.domain.generations import ShardKey
from holdfast.replicator.checksum import crc32c, require_consistent
from holdfast.replicator.names import label, parse_shard_path, shard_path
from holdfast.replicator.tiers import OpenShard, find, set_aside
from holdfast.shards import CHUNK_BYTES, Manifest, Reader, sync_directory

PAGE = 4096
# O_DIRECT is about 6× as fast as buffered writing and fsync for bulk, and does not flush the page cache of the training
# job; small files are better off with the cache: whoever restores them next finds them there.
DIRECT_BYTES_MIN = 16 << 20


class Incoming:
    """A shard on its way in: spans are verified as they arrive, in order, and only a whole one can be committed.

    `next_span` is where to go on: spans that an interrupted transfer of the same bytes left are found and kept.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._path = path
        # The checksum in the name: only a transfer of the same bytes may go on with what it finds.
        self._part = path.with_name(f".{path.name}.{manifest.crc32c:08x}.part")
        self._direct = -1
        self._fd = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._claim()
            _allocate(self._fd, path, manifest.size)
            self.next_span = self._verified_before()
            if manifest.size >= DIRECT_BYTES_MIN:
                self._direct = _open_direct(self._part)
        except BaseException:
            self.close()
            raise

    def write(self, data: memoryview) -> None:
        """The next span. Raises IntegrityError when it is not what the manifest says; it is not counted then."""
        span = self.manifest.spans[self.next_span]
        if len(data) != span.size or crc32c(data) != self.manifest.span_crc32c[self.next_span]:
            raise IntegrityError(
                f"{label(self.manifest.key)}: bytes {span.offset} to {span.offset + span.size} arrived damaged"
            )
        try:
            self._store(data, span.offset)
        except OSError as error:
            raise _out_of_space(error, self._path, self.manifest.size) from error
        self.next_span += 1

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
            raise _out_of_space(error, self._path, self.manifest.size) from error
        return self._path

    def close(self) -> None:
        """Keeps what has arrived, for a resumption; a committed shard stays committed."""
        for fd in (self._fd, self._direct):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct = -1

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


class FileTier:
    """One root directory of shard files. `below` is put between the job and its attempts."""

    def __init__(self, name: str, root: Path, below: str = "") -> None:
        self.name = name
        self._root = root
        self._below = below

    def jobs(self) -> list[str]:
        if not self._root.is_dir():
            return []
        return sorted(path.name for path in self._root.iterdir() if (path / self._below).is_dir())

    def shards(self, job: str) -> list[Manifest]:
        found: list[Manifest] = []
        for path in self._paths(job):
            try:
                manifest = Manifest.read(manifest_path(path))
            except (FileNotFoundError, HoldfastError):
                continue  # no manifest, no checkpoint
            key = parse_shard_path(path.relative_to(self._directory(job)))
            if (key, manifest.job) == (manifest.key, job) and path.stat().st_size == manifest.size:
                found.append(manifest)
        return found

    def path(self, job: str, key: ShardKey) -> Path:
        return self._directory(job) / shard_path(key)

    def open(self, job: str, key: ShardKey) -> OpenShard:
        path = self.path(job, key)
        try:
            manifest = Manifest.read(manifest_path(path))
            reader = Reader(path, key)
        except FileNotFoundError as error:
            raise NotFound(f"{label(key)} is not on {self.name}") from error
        if manifest.key != key or manifest.size != reader.header.size:
            reader.close()
            raise IntegrityError(f"{path} and its manifest are of different shards")
        return OpenShard(manifest, reader)

    @contextmanager
    def receive(self, job: str, manifest: Manifest) -> Iterator[Incoming]:
        """Room for a shard, reserved: raises OutOfSpace before the first byte, Conflict when it is already arriving."""
        if manifest.job != job:
            raise IntegrityError(f"a manifest of job {manifest.job!r} offered for job {job!r}")
        require_consistent(manifest)
        path = self.path(job, manifest.key)
        try:
            _make_directories(self._root, path.parent)
            incoming = Incoming(path, manifest)
        except OSError as error:
            raise _out_of_space(error, path, manifest.size) from error
        try:
            yield incoming
        finally:
            incoming.close()

    def put(self, job: str, source: OpenShard, pace: Callable[[int], None]) -> Path:
        """Copy an open shard in, verifying every span on the way. `pace(nbytes)` is called before each piece."""
        with self.receive(job, source.manifest) as incoming:
            for span in source.manifest.spans[incoming.next_span :]:
                pace(span.size)
                incoming.write(source.data[span.offset : span.offset + span.size])
            if not source.reader.still_whole():
                raise Conflict(f"{source.path} was overwritten in spite of its lock")
            return incoming.commit()

    def quarantine(self, job: str, key: ShardKey) -> None:
        path = self.path(job, key)
        set_aside(path, manifest_path(path))

    def delete(self, job: str, key: ShardKey) -> None:
        path = self.path(job, key)
        manifest_path(path).unlink(missing_ok=True)  # first: a shard without a manifest is none
        path.unlink(missing_ok=True)
        for left in find(path.parent, f".{path.name}.*"):
            left.unlink(missing_ok=True)
        if _remove_empty(path.parent):
            _remove_empty(path.parent.parent)

    def forget(self, job: str) -> None:
        directory = self._directory(job)
        if directory.exists():
            shutil.rmtree(directory)
        if self._below:
            _remove_empty(directory.parent)

    def sweep(self, job: str) -> int:
        """At start: remove what a crash left half-written. Returns how many files."""
        swept = 0
        for path in find(self._directory(job), "a*/s*/*"):
            orphan = (path.suffix == ".shard" and not manifest_path(path).exists()) or (
                path.suffix == ".json" and not path.with_suffix(".shard").exists()
            )
            if orphan or path.suffix in (".part", ".tmp"):
                path.unlink(missing_ok=True)
                swept += 1
        return swept

    def drop_unfinished(self, job: str, older_than: tuple[int, int]) -> None:
        """Remove transfers that nobody will resume: of steps before `older_than` (attempt, step), and not under way."""
        directory = self._directory(job)
        for part in find(directory, "a*/s*/.*.part"):
            final = part.with_name(part.name[1:].rsplit(".", 2)[0])
            key = parse_shard_path(final.relative_to(directory))
            if key is not None and (key.attempt, key.step) < older_than:
                _unlink_unclaimed(part)

    def _directory(self, job: str) -> Path:
        return self._root / job / self._below

    def _paths(self, job: str) -> list[Path]:
        return find(self._directory(job), "a*/s*/rank-*.shard")


def manifest_path(shard: Path) -> Path:
    return shard.with_suffix(".json")


def aligned_buffer() -> memoryview:
    """A page-aligned buffer of one span, as O_DIRECT wants it."""
    return memoryview(mmap.mmap(-1, CHUNK_BYTES))


def _unlink_unclaimed(part: Path) -> None:
    try:
        with part.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink(missing_ok=True)
    except (FileNotFoundError, BlockingIOError):
        return  # committed, or still arriving


def _make_directories(root: Path, directory: Path) -> None:
    """Create what is missing and make it durable, or a crash could take the directory with the committed file in it."""
    missing = [path for path in (directory, *directory.parents) if path.is_relative_to(root) and not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_directory(path.parent)


def _remove_empty(directory: Path) -> bool:
    """Whether it is gone now."""
    try:
        directory.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise
        return error.errno == errno.ENOENT
    return True


def _allocate(fd: int, path: Path, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
        os.ftruncate(fd, size)
    except OSError as error:
        # A file system without fallocate answers EOPNOTSUPP: writing will tell.
        if error.errno != errno.EOPNOTSUPP:
            raise _out_of_space(error, path, size) from error


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


def _out_of_space(error: OSError, path: Path, size: int) -> Exception:
    """`error`, or OutOfSpace with numbers when that is what it is."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return error
    directory = next(parent for parent in path.parents if parent.exists())
    stat = os.statvfs(directory)
    return OutOfSpace(f"no room for {size} bytes at {path}: {stat.f_bavail * stat.f_frsize} bytes are free there")
