"""The tiers on this node: memory and disk. A tier implements `LocalTier`; `service.py` builds it, `plan.py` uses it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from holdfast.domain.generations import ShardKey
from holdfast.shards import Manifest, Reader
from holdfast.shards.opening import ASIDE, make_way, move_aside, remove

_MAGIC = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True)
class OpenShard:
    """An open, locked shard. It is not overwritten until it is closed. The structure is checked; `Checksummer` checks the
    payload.

    `compared` is set if the digests of the shard have not been compared since it came from a peer. Who compares them calls it.
    """

    manifest: Manifest
    reader: Reader
    compared: Callable[[], None] | None = None

    @property
    def data(self) -> memoryview:
        return self.reader.data

    @property
    def path(self) -> Path:
        return self.reader.path

    def close(self) -> None:
        self.reader.close()

    def __enter__(self) -> OpenShard:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Damaged:
    """A file at the path of a shard that is not a valid shard. `aside`: it has been renamed. Otherwise it is left in place,
    because another release may read it, or because it cannot be read or renamed now."""

    path: Path
    reason: str
    aside: bool


class LocalTier(Protocol):
    """Blocking; call from a thread. `job` has passed `names.job_name`."""

    name: str  # "memory" or "disk", as in the inventory

    def jobs(self) -> list[str]:
        """Return the jobs that have files in this tier."""

    def shards(self, job: str) -> list[Manifest]:
        """Return every committed shard. Damaged and incomplete files are neither listed nor changed."""

    def open(self, job: str, key: ShardKey) -> OpenShard:
        """Open a shard. Raises NotFound, Conflict while it is being overwritten, and IntegrityError if the file is damaged."""

    def quarantine(self, job: str, key: ShardKey) -> None:
        """Rename a corrupt shard, so that it is kept for analysis but no longer listed."""

    def delete(self, job: str, key: ShardKey) -> None:
        """Delete a shard, if it exists."""

    def forget(self, job: str) -> None:
        """Delete all files of the job."""


def find(root: Path, pattern: str) -> list[Path]:
    """Return the files below `root` that match, sorted. Symbolic links to directories are not followed, because another job's
    files would be found twice. Directories that cannot be listed, or are deleted during the search, have no files."""
    return survey(root, pattern)[0]


def survey(root: Path, pattern: str) -> tuple[list[Path], list[Damaged]]:
    """As `find`. Also returns the objects in the place of a directory that cannot be searched."""
    places, unsearched = [root], list[Damaged]()
    *directories, last = pattern.split("/")
    for part in directories:
        places = [
            path for place in places for path in _matching(place, part, unsearched) if _may_enter(path, unsearched)
        ]
    return sorted(path for place in places for path in _matching(place, last, unsearched)), unsearched


def _matching(place: Path, part: str, unsearched: list[Damaged]) -> list[Path]:
    if not _MAGIC.search(part):
        return [place / part] if os.path.lexists(place / part) else []
    try:
        return [place / name for name in os.listdir(place) if fnmatchcase(name, part)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        unsearched.append(Damaged(place, f"the directory cannot be listed: {error.strerror}", aside=False))
        return []


def _may_enter(path: Path, unsearched: list[Damaged]) -> bool:
    try:
        if not path.is_symlink():
            return path.is_dir()
    except OSError as error:
        unsearched.append(Damaged(path, f"the directory cannot be searched: {error.strerror}", aside=False))
        return False
    if os.path.isdir(path):
        unsearched.append(Damaged(path, "a symbolic link in the place of a directory is not followed", aside=False))
    return False


def set_aside(shard: Path, manifest: Path) -> None:
    """Rename a corrupt shard. One per directory is kept, so that a failing disk does not fill up with them.

    Raises OSError if it cannot be renamed.
    """
    make_way(manifest)
    for older in find(shard.parent, f"*{ASIDE}"):
        if older.name != f"{manifest.name}{ASIDE}":
            remove(older)
    with suppress(FileNotFoundError):
        move_aside(shard)
