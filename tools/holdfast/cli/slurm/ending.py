"""The end of an allocation, which its batch node announces to the other nodes in a small file in the shared directory.

Slurm's own signals are not suitable: the signal before the time limit goes to the batch script only, and others go to every
process of a step, workers included.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.runtime.files import write_whole

FILE = "ending.json"
GRACE_S = 60.0  # before the end; the agents of an allocation save and leave in this time


@dataclass(frozen=True, slots=True)
class Ending:
    """`ends_at`: Unix time. `over`: the job has ended or is suspended, and its newest checkpoint is on the nodes' disks: agents
    end at once and their memory is freed."""

    slurm_job: str
    ends_at: float
    over: bool = False

    def write(self, directory: Path) -> None:
        write_whole(directory / FILE, json.dumps(asdict(self)).encode())


@dataclass(slots=True)
class EndWatch:
    """Decides when to notify the nodes of the end: after Slurm's signal, by the clock, or after `holdfast slurm cancel`. Pure;
    all times are Unix times.

    `grace_s`: time for the nodes after a cancellation. `ends_at`: the end according to Slurm, None if unknown. `signalled_at`:
    time of Slurm's signal. `cancelled_at`: time of the command. `announced`: the end that the nodes were last notified of.
    """

    notice_s: float
    grace_s: float = GRACE_S
    ends_at: float | None = None
    signalled_at: float | None = None
    cancelled_at: float | None = None
    announced: float | None = None

    def is_near(self, now: float) -> bool:
        """Whether to query Slurm for the end, because the time limit can change, also after the nodes were notified."""
        certain = self.signalled_at is not None or self.cancelled_at is not None or self.announced is not None
        return certain or (self.ends_at is not None and self.ends_at - now < self.notice_s)

    def due(self, now: float) -> float | None:
        """Return the end to announce to the nodes; None if it is not near, or has been announced."""
        if not self.is_near(now):
            return None
        ends_at = self.ends_at or (self.signalled_at or now) + self.notice_s
        if self.cancelled_at is not None:
            ends_at = min(ends_at, self.cancelled_at + self.grace_s)
        return None if self.announced is not None and abs(ends_at - self.announced) <= 1.0 else ends_at


def read(directory: Path, slurm_job: str) -> Ending | None:
    """Return the end that the batch node of this allocation has announced; None if there is no valid file of it."""
    try:
        raw = json.loads((directory / FILE).read_bytes())
        found = Ending(str(raw["slurm_job"]), float(raw["ends_at"]), raw.get("over") is True)
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
    return found if found.slurm_job == slurm_job else None
