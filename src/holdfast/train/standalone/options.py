"""Checkpoint options of the script, used without an agent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.domain.errors import InvalidSpec

ENV_DIRECTORY = "HOLDFAST_CHECKPOINT_DIR"
KEEP_MAX = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Checkpoints without services, for `hf.launch(main, checkpoint=…)`. Under an agent the job's own settings count.

    `directory` is on a disk of the node or shared between nodes; one run at a time. `interval_steps` 0 saves only when
    `force` or a signal asks for it. `keep` complete checkpoints stay on disk, at least one. With `peers`, nodes with
    directories of their own keep a copy of each other's shards, in pairs. `memory` holds two images per
    rank for the time of the run. `grace_s` is what a SIGTERM leaves for saving: end before the launcher loses patience
    (torchrun: 30 s).
    """

    directory: str | Path
    interval_steps: int = 100
    keep: int = 2
    peers: bool = True
    memory: str | Path = "/dev/shm"
    grace_s: float = 25.0

    def __post_init__(self) -> None:
        if not str(self.directory):
            raise InvalidSpec("checkpoint.directory", "", "a directory")
        if self.interval_steps < 0:
            raise InvalidSpec("checkpoint.interval_steps", self.interval_steps, "0 or more steps")
        if not 1 <= self.keep <= KEEP_MAX:
            raise InvalidSpec("checkpoint.keep", self.keep, f"1 to {KEEP_MAX} checkpoints")
        if self.grace_s <= 0:
            raise InvalidSpec("checkpoint.grace_s", self.grace_s, "seconds, more than 0")

    @classmethod
    def of_environment(cls, environ: Mapping[str, str], interval_steps: int) -> Checkpoints | None:
        """For a script that says nothing: by `HOLDFAST_CHECKPOINT_DIR`, None when that is not set either."""
        directory = environ.get(ENV_DIRECTORY, "")
        if not directory:
            return None
        return cls(directory=directory, interval_steps=interval_steps) if interval_steps else cls(directory=directory)

    def memory_of(self, run: str) -> Path:
        """The images of one run on this node; of this user, because /dev/shm is everybody's."""
        return Path(self.memory) / f"holdfast-{os.getuid()}" / run
