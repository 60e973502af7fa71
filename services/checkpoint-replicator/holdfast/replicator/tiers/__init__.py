"""The tiers on this node: memory and disk. A tier implements `Tier`; `service.py` builds it, `view.py` and `plan.py` use it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from types import TracebackType
from typing import Protocol

from holdfast.domain.generations import ShardKey
from holdfast.shards import Manifest, Reader
from holdfast.shards.opening import ASIDE, make_way, move_aside, remove


@dataclass(frozen=True, slots=True)
class OpenShard:
    """A shard held open: nobody overwrites it until it is closed. Structure checked, payload not yet: see `Checksummer`."""

    manifest: Manifest
    reader: Reader

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Damaged:
    """What lies in a shard's place and is none. `aside`: it has been moved out of the way; else it was left where it is,
    because another release may know it, or because it cannot be read or moved now."""

    path: Path
    reason: str
    aside: bool


class Tier(Protocol):
    """Blocking; call from a thread. `job` has passed `names.job_name`."""

    name: str  # "memory" or "disk", as the inventory says it

    def jobs(self) -> list[str]:
        """Jobs that have anything here."""

    def shards(self, job: str) -> list[Manifest]:
        """Every committed shard. What is damaged or unfinished is not listed, nor touched."""

    def open(self, job: str, key: ShardKey) -> OpenShard:
        """Raises NotFound, Conflict while it is being overwritten, IntegrityError when the file is damaged."""

    def quarantine(self, job: str, key: ShardKey) -> None:
        """Take a corrupt shard out of the way, kept for a post-mortem. It is not listed any more."""

    def delete(self, job: str, key: ShardKey) -> None:
        """Nothing happens when it is not there."""

    def forget(self, job: str) -> None:
        """Remove everything of the job."""


def find(root: Path, pattern: str) -> list[Path]:
    """Files below `root`, sorted. Unlike `Path.glob`, does not mind directories that vanish while it looks."""
    return sorted(root / name for name in glob(pattern, root_dir=root, include_hidden=True))


def set_aside(shard: Path, manifest: Path) -> None:
    """Rename a corrupt shard; one per directory is kept, so that a bad disk cannot fill itself with evidence.

    Raises OSError when it cannot be moved.
    """
    make_way(manifest)
    for older in find(shard.parent, f"*{ASIDE}"):
        if older.name != f"{manifest.name}{ASIDE}":
            remove(older)
    with suppress(FileNotFoundError):
        move_aside(shard)
