"""Lets workers that run as another user read the shards that they restore, and nothing else.

All directories of the tiers and all files in them belong to this process alone. A shard that is staged for a restore becomes
readable for the group of the workers, and its directories passable, not listable. The images in memory belong to the workers.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from holdfast.replicator.settings import ReplicatorSettings
from holdfast.replicator.tiers import OpenShard
from holdfast.runtime.private import let_pass


@dataclass(frozen=True, slots=True)
class Readers:
    """The user and the group of the workers. `roots`: the directories of the tiers."""

    uid: int
    gid: int
    roots: tuple[Path, ...]

    @property
    def owners(self) -> frozenset[int]:
        """Whose files are images: those of the workers, and those of workers that ran as the user of this process."""
        return frozenset((self.uid, os.geteuid()))

    def lend(self, shard: OpenShard) -> None:
        """Raises OSError."""
        shard.reader.allow(self.uid, self.gid)
        for directory in shard.path.parents:
            if directory in self.roots:
                break  # the agent has made it passable
            let_pass(directory)


def readers_of(settings: ReplicatorSettings) -> Readers | None:
    """Return the readers; None if workers run as the user of this process."""
    if settings.replicator_worker_uid < 0:
        return None
    roots = (settings.memory_dir, settings.disk_dir)
    return Readers(settings.replicator_worker_uid, settings.replicator_worker_gid, roots)
