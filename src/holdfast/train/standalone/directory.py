"""The disk tier of checkpoints without services: one directory, used by one run at a time.

A shard is written under a temporary name, fsynced and renamed; then its manifest in the same way. A crash before the last
rename leaves files that are not listed; the next start deletes them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import mmap
import os
import re
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import Conflict, HoldfastError, IntegrityError, OutOfSpace
from holdfast.domain.generations import ShardKey
from holdfast.shards import Manifest, Reader, spans_of, sync_directory
from holdfast.train.standalone import checksum

LOCK_WAIT_S: Final = 10.0  # children of a killed run hold its lock for a short time
LOCK_POLL_S: Final = 0.05
_STEP = re.compile(r"a(\d{1,12})/s(\d{1,15})")
_SHARD = re.compile(r"a(\d{1,12})/s(\d{1,15})/rank-(\d{1,9})\.(?:shard|json)")

_locks: weakref.WeakSet[Lock] = weakref.WeakSet()


def _close_inherited() -> None:
    """Close the lock in a forked child, so that a data-loader worker does not hold the directory of a killed trainer."""
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_close_inherited)


@dataclass(frozen=True, slots=True)
class Identity:
    """The run to which the checkpoints of a directory belong, and its newest attempt."""

    run: str
    attempt: int


class Lock:
    """Lock of a directory for one launch, shared by all its ranks (LOCK_SH). Another launch is refused.

    `launch` is a name that the ranks have agreed on. Raises Conflict if another launch holds the lock, or if the file
    system has no locks.
    """

    def __init__(self, directory: Path, launch: str, wait_s: float = LOCK_WAIT_S) -> None:
        self._fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take(directory, launch, time.monotonic() + wait_s)
        except BaseException:
            os.close(self._fd)
            raise
        _locks.add(self)

    def _take(self, directory: Path, launch: str, deadline: float) -> None:
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # shared by the ranks of a launch; check whether it is this launch
                pass
            except OSError as error:
                raise Conflict(f"{directory} cannot be locked ({error}): use a file system that has flock") from error
            else:
                os.pwrite(self._fd, launch.encode().ljust(64), 0)
            # The change from an exclusive to a shared lock is not atomic. The launch that reads its own name afterwards
            # holds the lock.
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                holder = os.pread(self._fd, 64, 0).decode(errors="replace").strip()
                if holder == launch:
                    return
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            if time.monotonic() > deadline:
                raise Conflict(f"another run is using {directory}: give each its own directory, or end the other one")
            time.sleep(LOCK_POLL_S)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            _locks.discard(self)


class Directory:
    """The shards of one run. Threads may work on different shards at the same time."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def create(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)

    # ------------------------------------------------------------ identity

    def identity(self) -> Identity | None:
        """Return the contents of run.json; None if there is no file. Raises IntegrityError if it is not a file of this
        format."""
        try:
            fields = json.loads((self.root / "run.json").read_bytes())
            return Identity(str(fields["run"]), int(fields["attempt"]))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise IntegrityError(f"{self.root / 'run.json'} is damaged: {error!r}") from error

    def begin(self, identity: Identity) -> None:
        """Record an attempt before it saves anything, so that no later start reuses its number."""
        temporary = self.root / f".run.{uuid.uuid4().hex}.part"
        with temporary.open("wb") as file:
            file.write(json.dumps({"run": identity.run, "attempt": identity.attempt}).encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self.root / "run.json")
        sync_directory(self.root)

    # ------------------------------------------------------------ shards

    def path(self, key: ShardKey) -> Path:
        return self.root / f"a{key.attempt}" / f"s{key.step}" / f"rank-{key.rank}.shard"

    def manifests(self, run: str) -> Iterator[tuple[Manifest, Path]]:
        """Return the committed shards of `run`. A shard with a damaged manifest is not committed."""
        for path in sorted(self._files("rank-*.json")):
            key = self._key(path)
            shard = path.with_suffix(".shard")
            try:
                manifest = Manifest.read(path)
                size = shard.stat().st_size
            except (FileNotFoundError, HoldfastError):
                continue
            if (key, size, manifest.job) == (manifest.key, manifest.size, run):
                yield manifest, shard

    def manifest(self, key: ShardKey, run: str) -> Manifest | None:
        try:
            manifest = Manifest.read(self.path(key).with_suffix(".json"))
        except (FileNotFoundError, HoldfastError):
            return None
        return manifest if (manifest.key, manifest.job) == (key, run) else None

    def store(self, image: Reader, *, run: str, node: str, pace: Callable[[int], None]) -> Manifest:
        """Checksum an image and write it in one pass. `pace(nbytes)` is called after each piece.

        Raises OutOfSpace, after which no file is left, and Conflict if the image changed despite its lock.
        """
        header = image.header
        algorithm = checksum.best()
        spans = spans_of(header.size, header.tensors_end)
        sums: list[int] = []

        def pieces() -> Iterator[memoryview]:
            for span in spans:
                piece = image.data[span.offset : span.offset + span.size]
                sums.append(algorithm.of(piece))
                yield piece
                pace(span.size)

        def manifest() -> Manifest:
            if not image.still_whole():
                raise Conflict(f"{image.path} was overwritten in spite of its lock")
            digest, whole = algorithm.summarise(spans, sums, header.tensors_end)
            made = Manifest.of(header, job=run, node=node, digest=digest, crc32c=whole, spans=tuple(sums))
            return replace(made, checksum=algorithm.name)

        return self._commit(header.stamp.key, header.size, pieces(), manifest)

    def receive(self, manifest: Manifest, pieces: Iterator[memoryview]) -> Path:
        """Write a shard from another node, one piece per span. Raises IntegrityError if it does not match its manifest."""

        def verified() -> Manifest:
            with self._part(self.path(manifest.key)).open("rb") as file:
                stored = mmap.mmap(file.fileno(), manifest.size, prot=mmap.PROT_READ)
            checksum.verify(manifest, memoryview(stored))
            return manifest

        self._commit(manifest.key, manifest.size, pieces, verified)
        return self.path(manifest.key)

    def _commit(
        self, key: ShardKey, size: int, pieces: Iterator[memoryview], manifest: Callable[[], Manifest]
    ) -> Manifest:
        path = self.path(key)
        part = self._part(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                if size:
                    os.posix_fallocate(fd, 0, size)  # a full disk fails here, before the first byte is written
                for piece in pieces:
                    _write_all(fd, piece)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # leave the page cache to the data loader
            finally:
                os.close(fd)
            made = manifest()
            part.rename(path)
            made.write(path.with_suffix(".json"))  # this fsync of the directory covers both renames
        except OSError as error:
            part.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfSpace(f"no room for a shard of {size} bytes below {self.root}: {error.strerror}") from error
            raise
        except HoldfastError:
            part.unlink(missing_ok=True)
            raise
        for directory in (path.parent.parent, self.root):  # new directories are entries of their parents
            sync_directory(directory)
        return made

    def delete(self, key: ShardKey) -> None:
        path = self.path(key)
        path.with_suffix(".json").unlink(missing_ok=True)  # first, because a shard without a manifest is not committed
        path.unlink(missing_ok=True)
        for directory in (path.parent, path.parent.parent):
            with contextlib.suppress(OSError):  # not empty, or another rank has removed it
                directory.rmdir()

    def present(self) -> list[ShardKey]:
        """Return every shard that has a file in the directory, committed or not."""
        found = {self._key(path) for path in self._files("rank-*")}
        return sorted((key for key in found if key is not None), key=lambda key: (key.attempt, key.step, key.rank))

    def steps(self) -> list[CheckpointId]:
        """Return (attempt, step) of every checkpoint that has files in the directory, complete or not."""
        found = (_STEP.fullmatch(path.relative_to(self.root).as_posix()) for path in self._steps())
        return sorted(CheckpointId(int(step[1]), int(step[2])) for step in found if step is not None)

    def mark(self, launch: str, rank: int) -> Path:
        """Return the path of a marker file, by which ranks find out whether they share the directory."""
        return self.root / f".seen-{launch}-{rank}"

    def marked(self, launch: str) -> int:
        """Return the lowest rank whose marker is in the directory, which identifies the directory."""
        prefix = f".seen-{launch}-"
        return min(int(path.name.removeprefix(prefix)) for path in self.root.glob(f"{prefix}*"))

    def sweep(self, launch: str = "") -> int:
        """Delete the uncommitted files of a crashed launch and return their number. Only at a start, before any rank
        writes."""
        marks = [path for path in self.root.glob(".seen-*") if not launch or launch not in path.name]
        left = [
            *self.root.glob(".run.*.part"),
            *marks,
            *self._files(".*.part"),
            *self._files(".*.tmp"),
        ]
        left += [shard for shard in self._files("rank-*.shard") if not shard.with_suffix(".json").exists()]
        for path in left:
            path.unlink(missing_ok=True)
        return len(left)

    def _steps(self) -> list[Path]:
        return [step for attempt in entries(self.root, "a*") for step in entries(attempt, "s*")]

    def _files(self, pattern: str) -> list[Path]:
        """Return the files of all steps whose names match."""
        return [file for step in self._steps() for file in entries(step, pattern)]

    def _key(self, path: Path) -> ShardKey | None:
        found = _SHARD.fullmatch(path.relative_to(self.root).as_posix())
        return ShardKey(int(found[1]), int(found[2]), int(found[3])) if found else None

    @staticmethod
    def _part(path: Path) -> Path:
        return path.with_name(f".{path.name}.part")


def entries(directory: Path, pattern: str) -> list[Path]:
    """Return the entries whose names match. A directory that another rank removes meanwhile has none, for which `Path.glob`
    raises."""
    try:
        return [directory / name for name in os.listdir(directory) if fnmatchcase(name, pattern)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
