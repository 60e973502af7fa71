"""Shards as files: `<root>/<job>/a<attempt>/s<step>/rank-<r>.shard` and its manifest `….json`. Used for the disk tier and,
under `staged/` of the memory directory, for shards that were fetched for a restore.

Commit: the shard is written under a temporary name, fsynced and renamed; then the manifest in the same way. A crash before the
last rename leaves files that are not listed; the next start deletes them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import Conflict, HoldfastError, IntegrityError, NotFound
from holdfast.domain.generations import ShardKey
from holdfast.replicator.checksum import require_consistent
from holdfast.replicator.names import label, parse_shard_path, shard_path
from holdfast.replicator.tiers import Damaged, OpenShard, find, set_aside, survey
from holdfast.replicator.tiers.incoming import Incoming
from holdfast.replicator.tiers.part import Part, full_is_out_of_space, manifest_path
from holdfast.replicator.tiers.pending_commit import PendingCommit
from holdfast.replicator.tiers.warm import WarmFiles
from holdfast.shards import Manifest, Reader, spans_of, sync_directory
from holdfast.shards.manifest import temporary_of
from holdfast.shards.opening import ASIDE, make_way, open_stored, remove

ASIDE_MAX = 8  # corrupt shards to keep per job and tier
SUSPICIOUS_MAX = 1000  # shards that are compared on arrival, because an earlier copy was corrupt
_SHARDS = "a*/s*/rank-*.shard"
_OURS = re.compile(r"rank-\d{1,9}\.(shard|json)|\.rank-\d{1,9}\.(shard\..*\.part|json\.tmp)")


class FileTier:
    """One root directory of shard files. `below` is a path component between the job and its attempts. `warm`: reusable files,
    if the directory is in memory.

    `compares_later`: digests of copies that come over an encrypted connection are compared when the copy is read. Which copies
    have been compared is kept in memory, so that after a restart all count as not compared. A shard that was set aside is
    compared on arrival when it comes again, so that its sender learns that it is damaged."""

    def __init__(
        self, name: str, root: Path, below: str = "", *, warm: WarmFiles | None = None, compares_later: bool = False
    ) -> None:
        self.name = name
        self._warm = warm
        self._compares_later = compares_later
        self._compared: set[tuple[str, ShardKey]] = set()
        self._suspicious: set[tuple[str, ShardKey]] = set()
        self._root = root
        self._below = below

    def jobs(self) -> list[str]:
        if not self._root.is_dir():
            return []
        return sorted(path.name for path in self._root.iterdir() if _may_be_directory(path / self._below))

    def shards(self, job: str) -> list[Manifest]:
        found: list[Manifest] = []
        for path in self._paths(job):
            with suppress(OSError, HoldfastError):
                found.append(self._committed(job, path))
        return found

    def look(self, job: str) -> tuple[list[Manifest], list[Damaged]]:
        """Return every committed shard and the damaged files, which are renamed if possible."""
        found: list[Manifest] = []
        paths, damaged = survey(self._root, self._pattern(job, _SHARDS))
        for path in paths:
            try:
                found.append(self._committed(job, path))
            except FileNotFoundError:
                continue  # not committed
            except IntegrityError as error:
                damaged.append(self._set_aside(job, path, str(error)))
            except (HoldfastError, OSError) as error:
                damaged.append(Damaged(path, str(error), aside=False))
        return found, damaged

    def _committed(self, job: str, path: Path) -> Manifest:
        """Raises FileNotFoundError for an uncommitted shard, Conflict for an intact shard of another name (a user has copied or
        renamed it), IntegrityError, IncompatibleVersion, OSError."""
        manifest = Manifest.read(manifest_path(path))
        key = parse_shard_path(path.relative_to(self._directory(job)))
        if (key, manifest.job) != (manifest.key, job):
            raise Conflict(f"{path} is a copy of {label(manifest.key)} of job {manifest.job!r} in a wrong place")
        fd = open_stored(path)
        try:
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        if size != manifest.size:
            raise IntegrityError(f"{path} is truncated: {size} of {manifest.size} bytes")
        return manifest

    def path(self, job: str, key: ShardKey) -> Path:
        return self._directory(job) / shard_path(key)

    def is_deleted(self, job: str, key: ShardKey) -> bool:
        """Whether the file of a shard is certainly not there."""
        try:
            self.path(job, key).lstat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            pass
        return False

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
        return OpenShard(manifest, reader, self._to_compare(job, manifest))

    def has(self, job: str, manifest: Manifest) -> bool:
        """Whether the tier has a shard with the same bytes."""
        try:
            with self.open(job, manifest.key) as mine:
                return (mine.manifest.crc32c, mine.manifest.size) == (manifest.crc32c, manifest.size)
        except HoldfastError:
            return False

    @contextmanager
    def receive(self, job: str, manifest: Manifest, *, local: bool = False) -> Iterator[Incoming]:
        """As `incoming`, closed at the end."""
        incoming = self.incoming(job, manifest, local=local)
        try:
            yield incoming
        finally:
            incoming.close()

    def incoming(self, job: str, manifest: Manifest, *, local: bool = False, later: bool = False) -> Incoming:
        """Reserve space for a shard. Raises OutOfSpace before the first byte, and Conflict if the shard is already
        being received. For `local` and `later` see `Incoming`; a tier without `compares_later` compares all on arrival."""
        if manifest.job != job:
            raise IntegrityError(f"a manifest of job {manifest.job!r} offered for job {job!r}")
        require_consistent(manifest)
        with self._space_for(self.path(job, manifest.key), manifest.size) as path:
            return Incoming(
                path,
                manifest,
                warm=self._warm,
                local=local,
                later=later and self._compares_later and (job, manifest.key) not in self._suspicious,
                uncompared=partial(self._note, job, manifest.key),
            )

    def _to_compare(self, job: str, manifest: Manifest) -> Callable[[], None] | None:
        """Return what `OpenShard.compared` is."""
        if not self._compares_later or not manifest.span_blake3 or (job, manifest.key) in self._compared:
            return None
        return partial(self._note, job, manifest.key, False)

    def _note(self, job: str, key: ShardKey, uncompared: bool) -> None:
        """Note whether the digests of this shard have yet to be compared."""
        if self._compares_later:
            (self._compared.discard if uncompared else self._compared.add)((job, key))

    def put(self, job: str, source: OpenShard, pace: Callable[[int], None]) -> Path:
        """Copy an open shard into this tier and verify every span. `pace(nbytes)` is called before each piece."""

        def contents(first_span: int) -> Iterator[memoryview]:
            for span in source.manifest.spans[first_span:]:
                pace(span.size)
                yield source.data[span.offset : span.offset + span.size]

        with self.receive(job, source.manifest, local=source.compared is None) as incoming:
            incoming.write_all(contents(incoming.next_span))
            if not source.reader.still_whole():
                raise Conflict(f"{source.path} was overwritten in spite of its lock")
            if source.compared is not None:
                source.compared()
            return incoming.commit()

    def put_fresh(self, job: str, fresh: PendingCommit, pace: Callable[[int], None]) -> Manifest:
        """Copy an image into this tier while its checksums are being computed. It is listed when both have finished.

        Raises Conflict if the image has been overwritten, OutOfSpace, and the error of a failed commit.
        """
        with fresh.seen.open() as reader:
            header = reader.header
            with self._space_for(self.path(job, reader.key), header.size) as path:
                part = Part(path, header.size, "fresh", what=label(reader.key), warm=self._warm)
            try:
                part.store_all(reader.data, spans_of(header.size, header.tensors_end), pace)
                manifest = fresh.manifest_of(reader)
                part.publish(manifest)
            except BaseException:
                part.discard()
                raise
            finally:
                part.close()
            return manifest

    @contextmanager
    def _space_for(self, path: Path, size: int) -> Iterator[Path]:
        with full_is_out_of_space(path, size):
            _make_directories(self._root, path.parent)
            yield path

    def quarantine(self, job: str, key: ShardKey) -> None:
        path = self.path(job, key)
        set_aside(path, manifest_path(path))
        self._note(job, key, True)
        if self._compares_later:
            if len(self._suspicious) >= SUSPICIOUS_MAX:
                self._suspicious.clear()
            self._suspicious.add((job, key))
        self._bound_aside(job)

    def _set_aside(self, job: str, path: Path, reason: str) -> Damaged:
        try:
            set_aside(path, manifest_path(path))
            self._bound_aside(job)
        except OSError as error:
            return Damaged(path, f"{reason}; the file cannot be renamed: {error}", aside=False)
        return Damaged(path, reason, aside=True)

    def _bound_aside(self, job: str) -> None:
        """Keep the newest corrupt shards of a job for analysis, and delete the others with their directories."""
        kept = sorted(self._find(job, f"a*/s*/*{ASIDE}"), key=lambda path: path.lstat().st_ctime)
        for path in kept[:-ASIDE_MAX]:
            remove(path)
            _remove_empty(path.parent)

    def delete(self, job: str, key: ShardKey) -> None:
        path = self.path(job, key)
        self._note(job, key, True)
        self._suspicious.discard((job, key))
        make_way(manifest_path(path))  # first, because a shard without a manifest is not committed
        if self._warm is None:
            make_way(path)
        else:
            self._warm.keep(path)
        for left in (*find(path.parent, f".{path.name}.*"), temporary_of(manifest_path(path))):
            remove(left)
        if _remove_empty(path.parent):
            _remove_empty(path.parent.parent)

    def forget(self, job: str) -> None:
        directory = self._directory(job)
        for noted in (self._compared, self._suspicious):
            noted.difference_update([each for each in tuple(noted) if each[0] == job])
        if directory.exists():
            shutil.rmtree(directory)
        if self._below:
            _remove_empty(directory.parent)
        if self._warm is not None:
            self._warm.give_back()

    def has_room(self, size: int) -> bool:
        """Whether there is room in this tier for a copy that could also be stored elsewhere."""
        return self._warm is None or self._warm.has_room(size)

    def newest(self, job: str, rank: int) -> ShardKey | None:
        """Return the newest shard of a rank, by the names of the manifests only."""
        directory = self._directory(job)
        paths = self._find(job, f"a*/s*/rank-{rank}.json")
        keys = filter(None, (parse_shard_path(path.relative_to(directory).with_suffix(".shard")) for path in paths))
        return max(keys, key=lambda key: key.checkpoint, default=None)

    def sweep(self, job: str) -> int:
        """Delete the incomplete files of a crash and return their number. Called at start. Other files and directories are
        left."""
        swept = 0
        for path in self._find(job, "a*/s*/*"):
            if _OURS.fullmatch(path.name) and _is_incomplete(path):
                with suppress(OSError):  # a directory, a file of another user, a read-only disk
                    path.unlink()
                    swept += 1
        return swept

    def drop_unfinished(self, job: str, older_than: CheckpointId) -> None:
        """Delete incomplete transfers of steps before `older_than` (attempt, step) that are not in progress."""
        directory = self._directory(job)
        for part in self._find(job, "a*/s*/.*.part"):
            final = part.with_name(part.name[1:].rsplit(".", 2)[0])
            key = parse_shard_path(final.relative_to(directory))
            if key is not None and key.checkpoint < older_than and _unlink_unclaimed(part):
                make_way(temporary_of(manifest_path(final)))

    def directory(self, job: str) -> Path:
        """Return the directory of a job, which may not exist."""
        return self._root / job

    def _directory(self, job: str) -> Path:
        return self._root / job / self._below

    def _pattern(self, job: str, pattern: str) -> str:
        return "/".join(filter(None, (job, self._below, pattern)))

    def _find(self, job: str, pattern: str) -> list[Path]:
        return find(self._root, self._pattern(job, pattern))

    def _paths(self, job: str) -> list[Path]:
        return self._find(job, _SHARDS)


def _may_be_directory(path: Path) -> bool:
    """Whether `path` is a directory, or is in a directory that cannot be searched."""
    try:
        return path.is_dir()
    except OSError:
        return True


def _is_incomplete(path: Path) -> bool:
    """Whether a file is a temporary file, or a shard or a manifest without its counterpart. False if that cannot be read."""
    if path.suffix in (".part", ".tmp"):
        return True
    other = {".shard": manifest_path(path), ".json": path.with_suffix(".shard")}.get(path.suffix)
    try:
        return other is not None and not other.exists()
    except OSError:
        return False


def _unlink_unclaimed(part: Path) -> bool:
    """Delete the file if it is unused. Returns whether it no longer exists."""
    try:
        with open(open_stored(part), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink(missing_ok=True)
            return True
    except (FileNotFoundError, BlockingIOError):
        return False  # committed, or still being received
    except (IntegrityError, PermissionError):
        return False  # not part of a transfer


def _make_directories(root: Path, directory: Path) -> None:
    """Create missing directories and fsync them, because a crash could otherwise remove a directory with a committed file."""
    missing = [path for path in (directory, *directory.parents) if path.is_relative_to(root) and not path.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for path in reversed(missing):
        sync_directory(path.parent)


def _remove_empty(directory: Path) -> bool:
    """Remove the directory if it is empty. Returns whether it no longer exists."""
    try:
        directory.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise
        return error.errno == errno.ENOENT
    return True
