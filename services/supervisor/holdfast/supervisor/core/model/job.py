"""The supervisor's data about one job, in groups of fields that change together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.domain.checkpoints import NOTHING_SAVED, CheckpointId
from holdfast.domain.findings import Finding
from holdfast.domain.generations import Generation, StoredStep
from holdfast.domain.job import JobSpec
from holdfast.domain.nodes import Notice
from holdfast.domain.numbers import Numbers
from holdfast.supervisor.core.model.lifecycle import (
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
from holdfast.supervisor.core.rules.election import Segment, Trusted
from holdfast.supervisor.core.rules.interval import STEPS_UNMEASURED, Interval, Measured
from holdfast.supervisor.core.rules.step_times import StepTimes
from holdfast.supervisor.protocol import JobPhase

# A doubt about the state is withdrawn, or becomes an error, within steps. If both messages were lost, it ends with this many.
# After a loss that stayed NaN, so many steps with a finite loss show that the weights never were.
DOUBT_STEPS_MAX = 200


@dataclass(frozen=True, slots=True)
class DeferredEviction:
    """A decision that a node keeps its ranks in spite of a maintenance notice. It is reconsidered if any of these changes."""

    notice: Notice
    candidates: tuple[str, ...]  # as in `AwaitedNodes`
    until: float


@dataclass(frozen=True, slots=True)
class StandingWarning:
    """A condition of a running job that costs time or may end the run later (standing_warnings.py)."""

    finding: Finding  # the newest finding of this condition
    first_at: float  # when the first finding of this occurrence arrived
    heard_at: float  # when the newest one arrived
    answered: bool = False  # the decision leaves the run as it is
    ask_at: float = 0.0  # the policy is asked (if answered: again) at this time; 0 = not by time
    cost_share: float | None = None  # the cost that the answer was based on
    had_spare: bool = False  # whether there was a spare when it was answered
    since: float = 0.0  # when this occurrence began, according to its first finding; 0 = unknown


@dataclass(frozen=True, slots=True)
class SkippedCheckpoint:
    """A complete checkpoint that could not be restored: for some shard, no source delivered intact bytes."""

    attempt: int
    step: int
    reason: str
    until: float  # Unix s, when it may be tried again
    tries: int
    nodes: tuple[str, ...]  # that could not restore it


@dataclass(frozen=True, slots=True)
class CheckpointRequest:
    """A checkpoint that an operator or a maintenance notice requested, until its outcome is reported."""

    operation: str  # the API operation to answer; empty = a record in the history is enough
    at_step: int
    until: float


@dataclass(frozen=True, slots=True)
class OnDemandSave:
    """The latest save outside the interval that all ranks of a generation were ordered to make."""

    generation: int
    at_step: int
    to_object_store: bool
    leaving: bool = False  # a planned change, or a stop, waits for it
    reason: str = ""  # of that, for the script
    votes_missing: int = 0  # nodes whose ranks have not agreed to it yet; 0 = agreed, or ordered without an agreement
    proposals: int = 1  # this one included; the earlier ones are void
    interval_steps: int = 0  # the interval of the steps after it; 0 = unchanged
    changing: bool = False  # all have agreed, and `votes_missing` nodes have not confirmed the interval yet

    @property
    def of_interval_only(self) -> bool:
        return self.interval_steps > 0 and not (self.to_object_store or self.leaving)


@dataclass(frozen=True, slots=True)
class Lent:
    """Replicas that the job gave up for a job of higher priority. It gets them back when there are nodes for them."""

    to: str
    at: float
    dp: int  # replicas that the lender kept


@dataclass(frozen=True, slots=True)
class Numbering:
    """How the generations of a job and the attempts of its checkpoints are numbered."""

    attempt_base: int  # attempt = base + generation number: unique over the submissions of one name
    first_attempt: int = 0  # first attempt of this submission; older ones are of earlier submissions. 0 = unknown
    seen: int = 0  # the newest generation that any node reported: an event log that lost its tail lacks it


@dataclass(frozen=True)
class Membership:
    """Which nodes and ranks of the running generation are present."""

    running_at: float = 0.0  # when the running generation was started
    absent: Mapping[str, float] = field(default_factory=dict)  # nodes that lack a living rank → since when
    finished: Numbers = field(default_factory=Numbers)  # ranks that ended with exit code 0


@dataclass(frozen=True)
class JobProgress:
    """The steps of the job, and its failures without progress (progress.py)."""

    step: int = 0  # newest step finished by all ranks; a restore sets it back
    best_step: int = 0  # newest step ever finished
    step_s: float = 0.0  # recent step time
    loss: float | None = None  # of the newest finished step that reported one
    reports_no_steps: bool = False  # the running generation's script does not use the library
    progressed: bool = False  # the running generation finished or saved a step beyond the one that it restored
    furthest_step: int = 0  # newest step finished or saved by generations that restored the same step as this one
    restarts_without_progress: int = 0  # consecutive generations that a worker fault ended before a new step
    restarts_without_advance: int = 0  # worker faults since `furthest_step` last grew
    outages: int = 0  # failures of a file system or a service since `furthest_step` last grew
    seen_step: int = 0  # newest step of the running generation that any witness has reported for any node
    seen_at: float = 0.0  # when that was reported
    longest_start_s: float | None = None  # from START to the first step of every rank; None = no generation has stepped
    pace_s: float = 0.0  # recent time from the end of one step to the next, work between steps included; 0 = unknown

    @property
    def seconds_per_step(self) -> float:
        """Time from the end of one step to the end of the next, or else the step time alone; 0 = unknown."""
        return self.pace_s or self.step_s

    @property
    def newest_step(self) -> int:
        """Newest step that any rank is known to have finished: ranks may have finished it before diagnostics reports it."""
        return max(self.step, self.seen_step)

    @property
    def finished_step(self) -> int:
        """Newest step that every rank is known to have finished. A rank that finishes a step needed the step before of all."""
        return max(self.step, self.seen_step - 1)


@dataclass(frozen=True)
class Checkpoints:
    """The known saved steps of the job, and its checkpoint interval."""

    lineage: tuple[Segment, ...] = ()
    step: int = 0  # newest step that every rank of the running generation has saved
    saved_at: float = 0.0  # when `step` became complete on the nodes
    at_home: Mapping[int, Numbers] = field(default_factory=dict)  # newer step → slots whose nodes hold all of their own
    ever_saved: bool = False  # a complete checkpoint has existed on this lineage
    stored: tuple[StoredStep, ...] = ()  # complete in the object store, newest first, reported by any node
    saved_by_all: CheckpointId = NOTHING_SAVED  # announced to the nodes as complete on all of them
    sharded: bool | None = None  # whether its checkpoints are sharded over dp; None = unknown
    skipped: tuple[SkippedCheckpoint, ...] = ()
    trusted: Trusted | None = None
    # `trusted` is due to a loss that stayed NaN. The first step of those in a row that had a finite loss since; 0 = none yet.
    finite_from: int | None = None
    resumed: StoredStep | None = None  # another submission's checkpoint that this one started from: root of the lineage
    measured: Measured = field(default_factory=Measured)
    interval: Interval | None = None  # None before the first start
    on_demand: OnDemandSave | None = None
    requests: tuple[CheckpointRequest, ...] = ()


@dataclass(frozen=True)
class Job:
    spec: JobSpec
    token: str
    submitted_at: float
    reason: str  # why it is in this state, one English clause
    target_dp: int
    numbering: Numbering
    doing: Doing
    # The two generations are large and seldom change. They are fields of the job because the snapshot stores them separately.
    generation: Generation | None = None  # the newest one, planned or running
    running: Generation | None = None  # the newest one that was started
    membership: Membership = field(default_factory=Membership)
    progress: JobProgress = field(default_factory=JobProgress)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    planned_not_before: float = 0.0
    changed_at: float = 0.0  # when the last planned change began
    warnings: Mapping[str, StandingWarning] = field(default_factory=dict)  # by condition
    deferred_evictions: Mapping[str, DeferredEviction] = field(default_factory=dict)  # by node
    # free nodes that it is about to take → kept for it until then
    kept: Mapping[str, float] = field(default_factory=dict)
    lent: Lent | None = None  # the newest loan, until all lent replicas run again
    lends_not_before: float = 0.0  # jobs of higher priority do not ask it for replicas before this time
    borrows_not_before: float = 0.0  # it does not ask other jobs for replicas before this time
    step_times: StepTimes = field(default_factory=StepTimes)  # of the last hour
    launcher: str = ""  # digest of the token by which the launcher finds its job again; empty = no launcher
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
        """Set while the job waits for nodes other than the present ones: to run at all, or (running) for a planned change."""
        match self.doing:
            case Pending(awaited=awaited) | Waiting(awaited=awaited) | Suspended(awaited=awaited):
                return awaited
            case Running(planned=AwaitedNodes() as awaited):
                return awaited
            case _:
                return None

    @property
    def held_since(self) -> float | None:
        """Since when it cannot run; None = it can, or no attempt was made yet."""
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
    def restore_limit(self) -> Trusted | None:
        """The last step that may be restored: the state is corrupt, or a loss that is not a number puts it in doubt until the
        loss is finite again, or another generation runs. None = any step may be."""
        limits = [self.checkpoints.trusted] if self.checkpoints.trusted is not None else []
        for finding in (each.finding for each in self.warnings.values()):
            step = finding.verified_step
            of_this_run = self.running is not None and finding.generation == self.running.number
            if step is not None and of_this_run and self.progress.step <= step + DOUBT_STEPS_MAX:
                limits.append(Trusted(step, finding.summary))
        return min(limits, key=lambda each: each.step, default=None)

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
