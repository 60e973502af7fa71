"""What a run of one large job says: its progress while it runs, and at its end the recoveries and what the simulation cost."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

PROGRESS_S = 5.0  # real time between two lines


@dataclass(frozen=True, slots=True)
class Recovery:
    """One fault that the job recovered from."""

    kind: str
    took_s: float  # virtual time, from the fault until the next generation runs
    spent_s: float  # CPU of this process since the recovery before


@dataclass(frozen=True, slots=True)
class Result:
    nodes: int
    ranks: int
    recoveries: tuple[Recovery, ...]
    furthest: int  # the highest step that was finished
    virtual_s: float
    spent_s: float  # CPU of this process
    events: int
    memory_mb: float  # peak, of this process

    @property
    def recovered(self) -> int:
        return len(self.recoveries)

    @property
    def kinds(self) -> dict[str, int]:
        return dict(Counter(each.kind for each in self.recoveries))

    def __str__(self) -> str:
        lines = [
            f"{self.nodes} nodes, {self.ranks} ranks: {_counted(self.recovered, 'fault')} recovered in "
            f"{self.virtual_s:.0f} s of virtual time; highest step {self.furthest}"
        ]
        for kind, count in sorted(self.kinds.items()):
            times = [each.took_s for each in self.recoveries if each.kind == kind]
            lines.append(
                f"  {count} × {kind}: running again after {median(times):.0f} s (median), {max(times):.0f} s at most"
            )
        lines.append(
            f"  {self.spent_s:.1f} s of CPU{self._of_faults()}, {self.events / self.spent_s:.0f} events/s, "
            f"{self.events / self.nodes / max(1, self.recovered):.1f} events per node and fault, "
            f"peak memory {self.memory_mb:.0f} MB"
        )
        return "\n".join(lines)

    def _of_faults(self) -> str:
        """The first fault includes the start of the job, so it says nothing about the cost of another one."""
        if len(self.recoveries) < 2:
            return ""
        return f", {per_fault_s(self.recoveries):.2f} s per fault after the first"


def per_fault_s(recoveries: Sequence[Recovery]) -> float:
    """CPU time per fault, without the first one, which includes the start of the job."""
    later = recoveries[1:]
    return sum(each.spent_s for each in later) / len(later)


class Progress:
    """Says how far a run is, in at most one line in `PROGRESS_S` of real time. The first line comes at once."""

    def __init__(self, faults: int) -> None:
        self._faults = faults
        self._shown_at: float | None = None

    def show(self, recoveries: Sequence[Recovery], doing: str) -> None:
        now = time.monotonic()
        if self._shown_at is not None and now < self._shown_at + PROGRESS_S:
            return
        self._shown_at = now
        sys.stderr.write(f"{progress(self._faults, recoveries, doing)}\n")
        sys.stderr.flush()


def progress(faults: int, recoveries: Sequence[Recovery], doing: str) -> str:
    done = f"{len(recoveries)} of {_counted(faults, 'fault')} recovered"
    if len(recoveries) < 2:
        return f"{done}; {doing}"
    each_s = per_fault_s(recoveries)
    left = _duration(each_s * (faults - len(recoveries)))
    return f"{done}, {each_s:.2f} s of CPU each, about {left} of CPU left; {doing}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"
