"""History: what the trimmed streams forget. A projection of the events and steps streams that can be rebuilt from them.

Nothing decides by it. It is behind its streams by milliseconds; whatever it is told twice it keeps once, by the position of
the stream entry. `history_sqlite` keeps it in a file; every supervisor has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.domain.findings import StepRecord
from holdfast.domain.incidents import Action, Incident
from holdfast.supervisor.history.booked import Booked
from holdfast.supervisor.protocol import (
    FindingJudged,
    GenerationChanged,
    JobAccepted,
    JobChanged,
    NodeChanged,
    PolicyChanged,
)
from holdfast.supervisor.published import LeaderChanged, OperationDone, PolicyAsked, Published


@dataclass(frozen=True, slots=True)
class EventEntry:
    """One entry of the events stream."""

    position: str
    record: Published


@dataclass(frozen=True, slots=True)
class ActionEntry:
    """One action of one incident, as it was decided."""

    number: int  # grows with time
    incident: Incident
    action: Action
    at: float


@dataclass(frozen=True, slots=True)
class Run:
    """Everything about one run of a job that its goodput is computed from."""

    accepted: JobAccepted
    changes: Sequence[JobChanged]
    generations: Sequence[GenerationChanged]
    incidents: Sequence[Incident]
    nodes: Sequence[NodeChanged]  # of the whole fleet, from its beginning
    steps: Sequence[StepRecord]
    booked: Booked | None = None  # what steps before these have added up to


@dataclass(frozen=True, slots=True)
class Series:
    """Steps of a job over time, in buckets of `bucket_s` from `since` (Unix seconds) on; those without a step are missing."""

    since: float
    bucket_s: float
    index: Sequence[int] = ()  # of the bucket, ascending
    step: Sequence[int] = ()  # newest one finished
    loss: Sequence[float | None] = ()  # mean of those that were reported
    tokens_per_s: Sequence[float] = ()  # steps that were done again count as well


class History(Protocol):
    """Reads and writes may be slow (they leave the event loop); pages are newest first."""

    async def add_events(self, events: Sequence[EventEntry], cursor: str) -> None:
        """Keep these; `cursor` is where to read on after a restart."""

    async def add_steps(self, steps: Sequence[StepRecord], cursor: str) -> None:
        """Keep these; the newest `steps_max` of a job stay, what is older is booked."""

    async def cursors(self) -> tuple[str, str]:
        """Where to read on in the events stream and in the steps stream; "0" = from the beginning."""

    async def incident(self, incident_id: str) -> Incident | None: ...

    async def incidents(
        self, *, job: str | None = None, node: str | None = None, before: int | None = None, limit: int
    ) -> list[tuple[int, Incident]]:
        """(number, incident), newest first; `before` is a number from an earlier page."""

    async def finding(self, finding_id: str) -> FindingJudged | None:
        """As it was judged last."""

    async def findings(
        self, *, job: str | None = None, node: str | None = None, before: int | None = None, limit: int
    ) -> list[tuple[int, FindingJudged]]:
        """(number, finding), newest first; a fault that is found again keeps its id, and its place."""

    async def actions(self, *, job: str | None, before: int | None, limit: int) -> list[ActionEntry]: ...

    async def policies(self, job: str) -> list[PolicyChanged]:
        """Those that decided about the newest run of the job, oldest first; the first is the one that it was submitted with."""

    async def asked(self, job: str, *, since: float, before: int | None, limit: int) -> list[tuple[int, PolicyAsked]]:
        """(number, question with its answer) of all runs of the job from `since` (Unix seconds) on, newest first."""

    async def operation(self, operation: str) -> OperationDone | None: ...

    async def leader(self) -> LeaderChanged | None:
        """The newest leader that has been heard of."""

    async def series(self, job: str, *, since: float, until: float, points_max: int) -> Series:
        """Kept steps of the job that ended within this time (Unix seconds), in at most `points_max` buckets."""

    async def run(self, job: str) -> Run | None:
        """The newest run of the job; None when there was none."""

    async def aclose(self) -> None: ...
