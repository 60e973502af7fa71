"""The end of an allocation, as its batch node tells the other nodes: a small file in the shared directory.

Slurm's own signals will not do for it: the one before the time limit goes to the batch script, and others go to every process
of a step, workers included.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.runtime.files import write_whole

FILE = "ending.json"
GRACE_S = 60.0  # in which the agents of an allocation save and leave; the job trains until it begins


@dataclass(frozen=True, slots=True)
class Ending:
    """`ends_at`: Unix time."""

    slurm_job: str
    ends_at: float

    def write(self, directory: Path) -> None:
        write_whole(directory / FILE, json.dumps(asdict(self)).encode())


@dataclass(slots=True)
class EndWatch:
    """When the nodes are to be told of the end, by Slurm's signal, by the clock or by `holdfast slurm cancel`. Pure; all times
    are Unix times.

    `grace_s`: what the nodes have after a cancellation. `ends_at`: as Slurm says, None if it does not. `told_at`: the signal.
    `cancelled_at`: the command. `announced`: the end as the nodes have been told.
    """

    notice_s: float
    grace_s: float = GRACE_S
    ends_at: float | None = None
    told_at: float | None = None
    cancelled_at: float | None = None
    announced: float | None = None

    def is_near(self, now: float) -> bool:
        """Whether Slurm is to be asked: the time limit may be changed, also after the nodes were told."""
        told = self.told_at is not None or self.cancelled_at is not None or self.announced is not None
        return told or (self.ends_at is not None and self.ends_at - now < self.notice_s)

    def due(self, now: float) -> float | None:
        """Return the end that the nodes are to be told; None if it is not near, or they have been told."""
        if not self.is_near(now):
            return None
        ends_at = self.ends_at or (self.told_at or now) + self.notice_s
        if self.cancelled_at is not None:
            ends_at = min(ends_at, self.cancelled_at + self.grace_s)
        return None if self.announced is not None and abs(ends_at - self.announced) <= 1.0 else ends_at


def read(directory: Path, slurm_job: str) -> Ending | None:
    """Return what the batch node of this allocation has written; None if there is nothing, or nothing of it."""
    try:
        raw = json.loads((directory / FILE).read_bytes())
        found = Ending(str(raw["slurm_job"]), float(raw["ends_at"]))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if found.slurm_job == slurm_job else None
