"""The values of a job's accounts: classes of time, the history that they are computed from, and the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from holdfast.domain.findings import StepRecord
from holdfast.domain.incidents import Incident
from holdfast.supervisor.history.booked import Booked

RATE_POINTS_MAX = 600  # of the tokens/s series: enough for any screen
SPANS_MAX = 2000  # of the series of spans: enough for any screen


class Class(StrEnum):
    USEFUL = "useful"
    RUNNING = "running"  # of a script that reports no steps
    STARTUP = "startup"
    DETECT = "detect"
    DECIDE = "decide"
    RECOVER = "recover"
    REWORK = "rework"
    STALL = "stall"
    WAIT = "wait"
    DEGRADED = "degraded"
    OTHER = "other"


BADPUT = tuple(name for name in Class if name not in (Class.USEFUL, Class.RUNNING))


@dataclass(frozen=True, slots=True)
class History:
    """The input of the ledger. Times are Unix seconds; series contain (time, value from then on), ascending."""

    started_at: float  # submission
    ended_at: float  # the end of the job, or now
    full_world_size: int
    full_nodes: int
    steps: Sequence[StepRecord] = ()
    incidents: Sequence[Incident] = ()
    waits: Sequence[tuple[float, float]] = ()  # (from, to) when the job could not run
    world_sizes: Sequence[tuple[float, int]] = ()  # ranks of the running generation
    paid_nodes: Sequence[tuple[float, int]] = ()  # nodes of this job and its spares
    unmeasured: Sequence[tuple[float, float]] = ()  # (from, to) when all ranks of a script that reports no steps ran
    booked: Booked | None = None  # sums of the steps before `steps`; None = there are none before


@dataclass(frozen=True, slots=True)
class Ledger:
    """Seconds by class, whose sum is `wall_s`; times in the series are seconds since submission."""

    wall_s: float
    seconds: dict[Class, float]
    goodput_job: float | None  # None: the script reports no steps
    goodput_paid: float | None  # None: the script reports no steps
    fault_free_tokens_per_s: float
    fault_free_flops_per_s: float  # as the script reports them; 0 = it does not
    tokens: int  # of new steps
    rework_steps: int
    world_sizes: tuple[tuple[float, int], ...]
    tokens_per_s: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Window:
    begin: float
    end: float
    record: StepRecord
    new: bool  # no earlier generation had finished this step

    @property
    def work_s(self) -> float:
        """The length of the window without the checkpoint stall."""
        return max(0.0, self.end - self.begin - self.record.stall_s)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a job's time, of one class. Unix seconds."""

    begin: float
    end: float
    kind: Class


@dataclass(frozen=True, slots=True)
class Recent:
    """Seconds by class of the latest part of a job's time, which add up to `until - since`. Unix seconds."""

    since: float
    until: float
    seconds: Mapping[Class, float]


@dataclass(frozen=True, slots=True)
class Inside(Recent):
    """A part of a job's time, and what its steps did in it."""

    fault_free_tokens_per_s: float
    fault_free_flops_per_s: float
    tokens: int  # of new steps
    rework_steps: int


@dataclass(slots=True)
class Book:
    seconds: dict[Class, float] = field(default_factory=lambda: dict.fromkeys(Class, 0.0))

    def add(self, name: Class, seconds: float) -> None:
        self.seconds[name] += max(0.0, seconds)
