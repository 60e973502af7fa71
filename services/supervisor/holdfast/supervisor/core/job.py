"""A job as the supervisor knows it. What belongs together stands together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.domain.checkpoints import NOTHING_SAVED, CheckpointId
from holdfast.domain.findings import Finding
from holdfast.domain.generations import Generation, StoredStep
from holdfast.domain.job import JobSpec
from holdfast.domain.nodes import Notice
from holdfast.domain.numbers import Numbers
from holdfast.supervisor.core.election import Segment, Trusted
from holdfast.supervisor.core.interval import STEPS_UNMEASURED, Interval, Measured
from holdfast.supervisor.core.lifecycle import (
    CHANGING,
    AwaitedNodes,
    Change,
    Completed,
    Deferred,
    Doing,
    FinalUpload,
    Pending,
    Planned,
    Running,
    Suspended,
    Waiting,
)
from holdfast.supervisor.core.step_times import StepTimes
from holdfast.supervisor.protocol import JobPhase


@dataclass(frozen=True, slots=True)
class DeferredEviction:
    """It was decided that a node keeps its ranks in spite of a maintenance notice: decided again when any of this changes."""

    notice: Notice
    candidates: tuple[str, ...]  # as in `AwaitedNodes`
    until: float


@dataclass(frozen=True, slots=True)
class StandingWarning:
    """A condition of a running job that costs time, or may end the run later (standing_warnings.py)."""

    finding: Finding  # the newest of this condition
    first_at: float  # when the first one of the same occurrence was heard
    heard_at: float  # and the newest
    answered: bool = False  # what was decided leaves the run as it is
    ask_at: float = 0.0  # the policy is not asked before; for an answered one, when it is asked again; 0 = not by time
    cost_share: float | None = None  # that the answer was about
    had_spare: bool = False  # when it was answered
    since: float = 0.0  # when this occurrence began, as its first finding says; 0 = not told


@dataclass(frozen=True, slots=True)
class SkippedCheckpoint:
    """A complete checkpoint that could not be restored: no source of some shard delivered it intact."""

    attempt: int
    step: int
    reason: str
    until: float  # then it is tried again
    tries: int
    nodes: tuple[str, ...]  # that could not restore it


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """A checkpoint that an operator or a maintenance notice asked for, until its outcome is reported."""

    operation: str  # empty = a note is enough
    at_step: int
    until: float


@dataclass(frozen=True, slots=True)
class OnDemandSave:
    """The latest save outside the interval that every rank of a generation was ordered to make."""

    generation: int
    at_step: int
    to_object_store: bool
    leaving: bool = False  # a planned change, or a stop, waits for it


@dataclass(frozen=True, slots=True)
class Lent:
    """Replicas that the job gave up for one of higher priority. They come back when there are nodes for them."""

    to: str
    at: float
    dp: int  # replicas that it kept


@dataclass(frozen=True, slots=True)
class Numbering:
    """How the generations of a job and the attempts of its checkpoints are numbered."""

    attempt_base: int  # attempt = base + generation number: unique over the submissions of one name
    first_attempt: int = 0  # of this submission; older attempts are an earlier submission's. 0 = not known
    seen: int = 0  # the newest generation that any node reported: an event log that lost its tail has forgotten it


@dataclass(frozen=True)
class Membership:
    """Which nodes and ranks of the running generation are there."""

    running_at: float = 0.0  # when the running generation was started
    absent: Mapping[str, float] = field(default_factory=dict)  # nodes that lack a living rank → since when
    finished: Numbers = field(default_factory=Numbers)  # ranks that ended with exit code 0


@dataclass(frozen=True)
class JobProgress:
    """Steps, and how often the job failed without finishing new ones (progress.py)."""

    step: int = 0  # newest step finished by all ranks; falls back with a restore
    best_step: int = 0  # newest step ever finished
    step_s: float = 0.0  # recent step time
    loss: float | None = None  # of the newest finished step that reported one
    reports_no_steps: bool = False  # the running generation's script does not use the library
    progressed: bool = False  # the running generation has finished or saved a step beyond the one that it restored
    furthest_step: int = 0  # newest step finished or saved by generations that restored the same step as this one
    restarts_without_progress: int = 0  # generations in a row that a worker's fault ended before a new step
    restarts_without_advance: int = 0  # worker faults since `furthest_step` last grew
    outages: int = 0  # failures of a file system or a service since `furthest_step` last grew
    seen_step: int = 0  # newest step of the running generation that any witness has reported for any node
    seen_at: float = 0.0  # when that was reported: the last sign of a step
    pace_s: float = 0.0  # recent time from one step to the next, with what the script does between them; 0 = not known

    @property
    def seconds_per_step(self) -> float:
        """From one step to the next, or of a step alone where no more is known; 0 = not known."""
        return self.pace_s or self.step_s


@dataclass(frozen=True)
class Checkpoints:
    """What is known of the job's saved steps, and how often it saves."""

    lineage: tuple[Segment, ...] = ()
    step: int = 0  # newest step that every rank of the running generation has saved
    saved_at: float = 0.0  # when `step` became complete on the nodes
    at_home: Mapping[int, Numbers] = field(default_factory=dict)  # newer step → slots whose nodes hold all of their own
    ever_saved: bool = False  # a complete checkpoint has existed on this lineage
    stored: tuple[StoredStep, ...] = ()  # complete in the object store, newest first, whoever reported them
    saved_by_all: CheckpointId = NOTHING_SAVED  # nodes were told that it is safe everywhere
    sharded: bool | None = None  # over dp, as its checkpoints show; None = not seen yet
    skipped: tuple[SkippedCheckpoint, ...] = ()
    trusted: Trusted | None = None
    resumed: StoredStep | None = None  # another submission's, that this one started from; the root of its lineage
    measured: Measured = field(default_factory=Measured)
    interval: Interval | None = None  # None before the first start
    on_demand: OnDemandSave | None = None
    requests: tuple[CheckpointRequest, ...] = ()


@dataclass(frozen=True)
class Job:
    spec: JobSpec
    token: str
    submitted_at: float
    reason: str  # why it does what it does, one English clause
    target_dp: int
    numbering: Numbering
    doing: Doing
    # The two generations are large and seldom change: they stand here because the snapshot writes them apart from the rest.
    generation: Generation | None = None  # the newest one, planned or running
    running: Generation | None = None  # the newest one that was told to run
    membership: Membership = field(default_factory=Membership)
    progress: JobProgress = field(default_factory=JobProgress)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    planned_not_before: float = 0.0
    changed_at: float = 0.0  # when the last planned change began
    warnings: Mapping[str, StandingWarning] = field(default_factory=dict)  # by condition
    deferred_evictions: Mapping[str, DeferredEviction] = field(default_factory=dict)  # by node
    kept: Mapping[str, float] = field(
        default_factory=dict
    )  # free nodes that it is about to take → kept for it until then
    lent: Lent | None = None  # the newest loan, until all of its replicas run again
    lends_not_before: float = 0.0  # no job of higher priority asks it for replicas before
    borrows_not_before: float = 0.0  # it asks no job for replicas before
    step_times: StepTimes = field(default_factory=StepTimes)  # of the last hour
    launcher: str = ""  # digest of the token with which its launcher finds it again; empty = nobody does
    owner: str = ""  # name of the API's token that it was submitted with; empty = without one

    @property
    def phase(self) -> JobPhase:
        return self.doing.phase

    @property
    def change(self) -> Change | None:
        """The change in flight."""
        return self.doing.change if isinstance(self.doing, CHANGING) else None

    @property
    def planned(self) -> Planned | None:
        """The planned change that waits for its checkpoint."""
        planned = self.doing.planned if isinstance(self.doing, Running) else None
        return planned if isinstance(planned, Planned) else None

    @property
    def awaited_nodes(self) -> AwaitedNodes | None:
        """Set while it waits for other nodes than there are: to run at all, or (running) for a planned change."""
        match self.doing:
            case Pending(awaited=awaited) | Waiting(awaited=awaited) | Suspended(awaited=awaited):
                return awaited
            case Running(planned=AwaitedNodes() as awaited):
                return awaited
            case _:
                return None

    @property
    def held_since(self) -> float | None:
        """Since when it has not been able to run; None = it can, or it has not been tried yet."""
        match self.doing:
            case Pending(awaited=AwaitedNodes(since=since)) | Waiting(awaited=AwaitedNodes(since=since)):
                return since
            case Suspended(at=at, returning_at=returning_at):
                return returning_at or at
            case Deferred(since=since):
                return since
            case _:
                return None

    @property
    def final_upload(self) -> FinalUpload | None:
        return self.doing.upload if isinstance(self.doing, Completed) else None

    @property
    def interval_steps(self) -> int:
        """A checkpoint is due at every multiple of it."""
        interval = self.checkpoints.interval
        return interval.steps if interval else self.spec.checkpoint.interval_steps or STEPS_UNMEASURED

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def number(self) -> int:
        return self.generation.number if self.generation else 0
