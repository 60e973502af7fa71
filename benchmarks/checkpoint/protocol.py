"""What a trial's process is told, and what it says."""

from __future__ import annotations

from dataclasses import dataclass

LIMIT = "copy"  # the contender that is no checkpoint but the limit of every one
RESTORE = "restore"  # instead of a contender: load what HOLDFAST_RESTORE names
SEED = "seed"  # instead of a contender: save once with Holdfast, and leave

# `{"at": …}` on the process's standard output
WARM = "warm"  # the state stands and steps run
WARMED = "warmed"  # the saves that are not counted are over
RESULT = "result"

# `STEP TIER TIME` on its standard input: a shard has come to a tier. TIME is time.monotonic's, the same in every process.
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
    mark: int = 0  # stamped into the save that is restored
