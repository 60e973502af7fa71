"""The interface of the history, which keeps what the trimmed streams lose. It is a projection of the events and steps streams.

No decision depends on it. It lags its streams by milliseconds. An entry that arrives twice is stored once, identified by its
position in the stream. `history/sqlite.py` stores it in a file; every supervisor has its own.
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
    """One decided action of an incident."""

    number: int  # grows with time
    incident: Incident
    action: Action
    at: float


@dataclass(frozen=True, slots=True)
class Run:
    """The data of one run of a job from which its goodput is computed."""

    accepted: JobAccepted
    changes: Sequence[JobChanged]
    generations: Sequence[GenerationChanged]
    incidents: Sequence[Incident]
    nodes: Sequence[NodeChanged]  # of the whole fleet, from its beginning
    steps: Sequence[StepRecord]
    booked: Booked | None = None  # sums of the steps before these


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
        """Store these; `cursor` is the position to continue reading from after a restart."""

    async def add_steps(self, steps: Sequence[StepRecord], cursor: str) -> None:
        """Store these. The newest `steps_max` of a job are kept; older ones are added to its sums."""

    async def cursors(self) -> tuple[str, str]:
        """Positions to continue reading from in the events and steps streams; "0" = from the beginning."""

    async def incident(self, incident_id: str) -> Incident | None: ...

    async def incidents(
        self, *, job: str | None = None, node: str | None = None, before: int | None = None, limit: int
    ) -> list[tuple[int, Incident]]:
        """(number, incident), newest first; `before` is a number from an earlier page."""

    async def finding(self, finding_id: str) -> FindingJudged | None:
        """The finding as it was judged last."""

    async def findings(
        self, *, job: str | None = None, node: str | None = None, before: int | None = None, limit: int
    ) -> list[tuple[int, FindingJudged]]:
        """(number, finding), newest first. A fault that is found again keeps its id and its place."""

    async def actions(self, *, job: str | None, before: int | None, limit: int) -> list[ActionEntry]: ...

    async def policies(self, job: str) -> list[PolicyChanged]:
        """The policies of the newest run of the job, oldest first; the first one is that of the submission."""

    async def asked(self, job: str, *, since: float, before: int | None, limit: int) -> list[tuple[int, PolicyAsked]]:
        """(number, question with its answer) for all runs of the job since `since` (Unix seconds), newest first."""

    async def operation(self, operation: str) -> OperationDone | None: ...

    async def leader(self) -> LeaderChanged | None:
        """The newest known leader."""

    async def series(self, job: str, *, since: float, until: float, points_max: int) -> Series:
        """Kept steps of the job that ended within this time (Unix seconds), in at most `points_max` buckets."""

    async def jobs(self, *, before: float) -> list[str]:
        """Names of the jobs whose newest run was submitted before this time (Unix seconds), newest first."""

    async def run(self, job: str) -> Run | None:
        """The newest run of the job; None if there was none."""

    async def aclose(self) -> None: ...
