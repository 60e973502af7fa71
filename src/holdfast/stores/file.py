"""`file://`: a directory as object store, for file systems that all nodes share (NFS, Lustre, WekaFS …).

An object is written under a temporary name in `.incoming`, fsynced, and then renamed to its key or, with `if_absent`,
hard-linked (`link` fails on an existing name also if several clients race, which open(O_EXCL) does not guarantee on every
NFS). Finally the directory is fsynced. A crashed writer leaves only a temporary file; the next writer deletes it when it has
not grown for an hour."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from holdfast.domain.errors import (
    HoldfastError,
    IntegrityError,
    InvalidSpec,
    NotFound,
    OutOfSpace,
    Unavailable,
)
from holdfast.shards.manifest import sync_directory
from holdfast.stores.checksum import crc32c as checksum
from holdfast.stores.protocol import ObjectInfo, Pace, check_key, unpaced

WRITE_BYTES = 8 << 20  # checksummed, paced and written at a time
DIRTY_BYTES_MAX = 64 << 20  # more unwritten pages would delay other writes of the node
ABANDONED_S = 3600.0  # by the file system's own clock
LINK_TRIES = 3  # retries after a concurrent deletion of the directory
INCOMING = ".incoming"

_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
_REFUSED = frozenset((errno.EACCES, errno.EPERM, errno.EROFS))
_ABSENT = frozenset((errno.ENOENT, errno.ENOTDIR))


class FileStore:
    """Objects as files below `root`. `root` is created at the first write, but its parent is not, so that a missing mount is
    an error and does not lead to checkpoints on the wrong disk."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._swept = False
        self._lock = Lock()

    @property
    def url(self) -> str:
        return f"file://{self._root}"

    def put(
        self,
        key: str,
        parts: Sequence[memoryview | bytes],
        *,
        crc32c: int,
        if_absent: bool = False,
        pace: Pace = unpaced,
    ) -> bool:
        path = self._path(key)
        with self._errors(key):
            if if_absent and path.exists():
                return False
            temporary = self._temporary()
            try:
                if _write(temporary, parts, pace) != crc32c:
                    raise IntegrityError(f"{key}: the bytes do not match their checksum {crc32c:08x}")
                return self._place(temporary, path, if_absent=if_absent)
            finally:
                temporary.unlink(missing_ok=True)

    def read_into(self, key: str, target: memoryview, offset: int = 0) -> None:
        with self._errors(key), self._path(key).open("rb", buffering=0) as file:
            done = 0
            while done < len(target):
                read = os.preadv(file.fileno(), [target[done:]], offset + done)
                if not read:
                    raise IntegrityError(f"{key} ends at byte {offset + done}, before byte {offset + len(target)}")
                done += read

    def read(self, key: str, size_max: int) -> bytes:
        with self._errors(key), self._path(key).open("rb") as file:
            content = file.read(size_max + 1)
        if len(content) > size_max:
            raise IntegrityError(f"{key} has more than the limit of {size_max} bytes")
        return content

    def stat(self, key: str) -> ObjectInfo | None:
        try:
            with self._errors(key):
                found = self._path(key).stat()
        except NotFound:
            return None
        return _info(key, found) if stat.S_ISREG(found.st_mode) else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        directory = prefix.rpartition("/")[0]
        if directory:
            check_key(directory)
        with self._errors(prefix):
            if not self._root.exists():
                self._root.parent.stat()  # a missing mount is not an empty store
            yield from self._walk(self._root / directory, f"{directory}/" if directory else "", prefix)

    def delete(self, key: str) -> None:
        path = self._path(key)
        try:
            with self._errors(key):
                path.unlink()
        except NotFound:
            return
        self._remove_empty(path.parent)

    def close(self) -> None:
        """No-op: there are no connections."""

    # ------------------------------------------------------------ writing

    def _temporary(self) -> Path:
        """Create an empty temporary file. The first call deletes the files of crashed writers."""
        incoming = self._root / INCOMING
        if not incoming.is_dir():
            self._root.mkdir(exist_ok=True)
            incoming.mkdir(exist_ok=True)
        temporary = incoming / uuid.uuid4().hex
        temporary.touch(mode=0o644, exist_ok=False)
        with self._lock:
            sweep, self._swept = not self._swept, True
        if sweep:
            _sweep(incoming, now=temporary.stat().st_mtime)  # by the file system's clock
        return temporary

    def _place(self, temporary: Path, path: Path, *, if_absent: bool) -> bool:
        for _ in range(LINK_TRIES):
            self._make_directories(path.parent)
            try:
                if if_absent:
                    os.link(temporary, path)
                else:
                    temporary.rename(path)
            except FileExistsError:
                # An NFS client repeats a link whose answer was lost, and the repetition fails on the link that exists
                # already.
                return path.samefile(temporary)
            except FileNotFoundError:  # a concurrent deletion removed the empty directory
                continue
            sync_directory(path.parent)
            return True
        raise Unavailable(
            f"{path} cannot be put in place: its directory or its temporary file is removed again and again"
        )

    def _make_directories(self, directory: Path) -> None:
        """As `mkdir -p`, with fsync, because a crash could otherwise remove the directory together with an fsynced file."""
        missing = []
        while not directory.is_dir():
            missing.append(directory)
            directory = directory.parent
        for each in reversed(missing):
            each.mkdir(exist_ok=True)
            sync_directory(each.parent)

    def _remove_empty(self, directory: Path) -> None:
        while directory != self._root:
            try:
                directory.rmdir()
            except OSError:  # not empty, or already removed
                return
            directory = directory.parent

    # ------------------------------------------------------------ reading

    def _walk(self, directory: Path, at: str, prefix: str) -> Iterator[ObjectInfo]:
        try:
            with os.scandir(directory) as entries:
                found = sorted((e.name + "/" if e.is_dir(follow_symlinks=False) else e.name, e) for e in entries)
        except (FileNotFoundError, NotADirectoryError):
            return
        for name, entry in found:
            key = at + name
            if name.startswith(".") or not (key.startswith(prefix) or prefix.startswith(key)):
                continue
            if name.endswith("/"):
                yield from self._walk(directory / entry.name, key, prefix)
            elif key.startswith(prefix) and (info := _entry_info(key, entry)):
                yield info

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    @contextmanager
    def _errors(self, key: str) -> Iterator[None]:
        try:
            yield
        except HoldfastError:
            raise
        except OSError as error:
            raise self._meaning(error, key) from error

    def _meaning(self, error: OSError, key: str) -> HoldfastError:
        if error.errno in _FULL:
            return OutOfSpace(f"no room for {key} in {self.url} ({error.strerror}): {_room(self._root)}")
        if error.errno in _REFUSED:
            return InvalidSpec("store", self.url, f"a directory that may be read and written ({error})")
        if error.errno in _ABSENT:
            if not self._root.parent.is_dir():
                return Unavailable(f"{self._root.parent} does not exist: is the file system of {self.url} mounted?")
            return NotFound(f"{key} does not exist in {self.url}")
        return Unavailable(f"{self.url} fails with {key}: {error}")


def _write(path: Path, parts: Sequence[memoryview | bytes], pace: Pace) -> int:
    """Write and fsync the parts. Returns the checksum of the bytes passed to the kernel."""
    value = dirty = 0
    with path.open("r+b", buffering=0) as file:
        for part in parts:
            view = memoryview(part).cast("B")
            for start in range(0, len(view), WRITE_BYTES):
                piece = view[start : start + WRITE_BYTES]
                pace(len(piece))
                value = checksum(piece, value)
                dirty += len(piece)
                while piece:
                    piece = piece[file.write(piece) :]
                if dirty >= DIRTY_BYTES_MAX:
                    os.fdatasync(file.fileno())
                    dirty = 0
        os.fsync(file.fileno())
    return value


def _sweep(incoming: Path, now: float) -> None:
    for left in incoming.iterdir():
        try:
            if now - left.stat().st_mtime > ABANDONED_S:
                left.unlink()
        except FileNotFoundError:  # its writer has finished, or another process deletes it
            continue


def _entry_info(key: str, entry: os.DirEntry[str]) -> ObjectInfo | None:
    try:
        found = entry.stat(follow_symlinks=False)
    except FileNotFoundError:  # deleted during the listing
        return None
    return _info(key, found) if stat.S_ISREG(found.st_mode) else None


def _info(key: str, found: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, found.st_size, None, found.st_mtime)


def _room(root: Path) -> str:
    try:
        found = os.statvfs(root)
    except OSError as error:
        return f"free space unknown: {error.strerror}"
    return f"{found.f_bavail * found.f_frsize} bytes are free there"
