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
    """Checkpoints without services, for `hf.launch(main, checkpoint=…)`. Ignored under an agent.

    `directory`: on a disk of the node or shared between nodes; used by one run at a time. `interval_steps`: 0 saves only with
    `force` or on a signal. `keep`: number of complete checkpoints to retain on disk, at least one. `peers`: nodes with separate
    directories keep copies of each other's shards, in pairs. `memory`: directory of the two images per rank during the run.
    `grace_s`: time for saving after a SIGTERM, less than the launcher's limit (torchrun: 30 s).
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
        """Return the options from `HOLDFAST_CHECKPOINT_DIR`; None if it is not set."""
        directory = environ.get(ENV_DIRECTORY, "")
        if not directory:
            return None
        return cls(directory=directory, interval_steps=interval_steps) if interval_steps else cls(directory=directory)

    def memory_of(self, run: str) -> Path:
        """Return the directory of the images of one run on this node, per user, because /dev/shm is shared."""
        return Path(self.memory) / f"holdfast-{os.getuid()}" / run
