"""The request to a trial's process, and the messages that it prints."""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = "copy"  # the contender that is not a checkpoint, but the limit of all of them
RESTORE = "restore"  # instead of a contender: load the shard that HOLDFAST_RESTORE names
SEED = "seed"  # instead of a contender: save once with Holdfast, and exit

# `{"at": …}` on the process's standard output
WARM = "warm"  # the state exists and steps run
WARMED = "warmed"  # the saves that are not counted have ended
RESULT = "result"

# `STEP TIER TIME` on its standard input: a shard is in a tier. TIME is in time.monotonic, which is the same in every process.
DISK = "disk"
PEER = "peer"


@dataclass(frozen=True, slots=True)
class Request:
    contender: str
    nbytes: int
    directory: str  # on the local disk
    memory: str  # on a memory file system
    saves: int = 0
    before_steps: int = 100  # timed before each save
    save_timeout_s: float = 90.0
    mark: int = 0  # stamp of the save that is restored
