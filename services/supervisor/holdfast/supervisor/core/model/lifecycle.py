"""The states of a job, the data of each state, and the causes that lead from one state to another.

Theory of operation. `Job.doing` is one value. Its class is the state. It holds the data that this state needs and nothing else:
a waiting job has the nodes that it could have used, a preparing job has its unanswered orders. A combination that makes no
sense, such as a change in flight of a finished job, cannot be represented.

`Turn.move` is the only way from one state to another. It looks up `TRANSITIONS`, which is the complete table. A cause that is
not listed for a state is a bug in the caller: `IllegalTransition`, with the state and the cause, is raised before anything is
written. Within a state, `Turn.update` replaces its data. `Job.phase`, which operators and policies see, is derived from the
state. `make state-diagram` draws the table into docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from holdfast.domain.incidents import Action, NodeTiming
from holdfast.domain.numbers import Numbers
from holdfast.supervisor.core.rules.election import Origin
from holdfast.supervisor.protocol import JobPhase

# ---------------------------------------------------------------- the data of the states


@dataclass(frozen=True)
class Change:
    """A change to the job's newest generation, from its plan to the first step of every rank."""

    incidents: tuple[str, ...]  # the incidents that it resolves, root cause first; empty for a first start
    began_at: float
    excluded: tuple[str, ...] = ()  # nodes that failed to prepare in this change or in the changes that it replaces
    refused: bool = False  # a connected node reported a failure, or no node prepared in time
    replans: int = 0  # abandoned changes before this one that began for the same reason
    origin: Origin = Origin.NOWHERE  # the farthest tier that a rank restores from
    saved_dp: int = 0  # re-sharding: replicas that saved the state; 0 = each rank restores its own shard
    phases_s: Mapping[str, float] = field(default_factory=dict)  # slowest so far, as nodes and ranks report them
    restored_from: Mapping[str, int] = field(default_factory=dict)  # shards by source, as nodes report them
    restored_bytes: Mapping[str, int] = field(default_factory=dict)  # by source, as nodes report them
    shares: tuple[NodeTiming, ...] = ()  # timings of the nodes that were last, for the incidents' records
    came_back: tuple[str, ...] = ()  # nodes that connected during it with workers of another generation


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned change that waits for a checkpoint, so that few steps are repeated."""

    incident: str
    action: Action
    at_step: int  # the checkpoint that it waits for
    tries: int = 1


@dataclass(frozen=True, slots=True)
class AwaitedNodes:
    """The decision to wait. It is reconsidered when there are other nodes."""

    since: float
    candidates: tuple[str, ...]  # nodes that the job could have used at the decision
    uses: int = -1  # `State.uses` when the candidates were last compared; -1 = not yet
    for_time: bool = False  # it is retried after a time, also if no node changes


@dataclass(frozen=True, slots=True)
class FinalUpload:
    """The upload of a completed job's last checkpoint to the object store. Until it ends, nodes keep the job's files."""

    until: float
    step: int = 0  # the step that the nodes were ordered to upload
    status: str = "its last save is not known yet"
    finished: bool = False


# ---------------------------------------------------------------- the states


@dataclass(frozen=True, slots=True)
class Pending:
    """The job has never run."""

    phase: ClassVar = JobPhase.PENDING
    awaited: AwaitedNodes | None = None  # None: it waits for its full mesh, or for the checkpoint to resume from


@dataclass(frozen=True)
class Preparing:
    """Prepare orders were sent to the nodes of the new generation, Stop orders to the nodes that leave."""

    phase: ClassVar = JobPhase.PREPARING
    change: Change
    stops: Mapping[str, str]  # order id → node: Stop orders that are not answered yet
    unprepared: Numbers = field(default_factory=Numbers)  # slots that have not answered their Prepare yet
    master: str = ""  # the rendezvous endpoint, once its node has reported it
    fenced: bool = False  # the wait for nodes of a generation whose nodes were all lost is over


@dataclass(frozen=True)
class Starting:
    """Start orders of the new generation were sent."""

    phase: ClassVar = JobPhase.STARTING
    change: Change
    started_at: float
    stepping: Numbers = field(default_factory=Numbers)  # ranks that have finished a step
    stepped_at: float = 0.0  # the latest first step so far
    stepped_to: int = 0  # the newest step that all ranks that have reported have finished; 0 = none


@dataclass(frozen=True, slots=True)
class Replanning:
    """A fault occurred during the change in flight. The change was abandoned, and the policy is asked again."""

    phase: ClassVar = JobPhase.PREPARING


@dataclass(frozen=True, slots=True)
class Resetting:
    """Its workers stop and GPUs of its nodes are reset. Afterwards the next generation is planned on the same nodes."""

    phase: ClassVar = JobPhase.PREPARING
    incident: str  # whose action demands the reset
    nodes: tuple[str, ...]  # whose GPUs are reset
    phases_s: Mapping[str, float] = field(default_factory=dict)  # slowest so far, as nodes report them


@dataclass(frozen=True, slots=True)
class Running:
    """Every rank has stepped."""

    phase: ClassVar = JobPhase.RUNNING
    planned: Planned | AwaitedNodes | None = None  # a planned change that has not begun


@dataclass(frozen=True, slots=True)
class Waiting:
    """The job has run before, and cannot run on the present nodes."""

    phase: ClassVar = JobPhase.WAITING
    awaited: AwaitedNodes


@dataclass(frozen=True, slots=True)
class Suspended:
    """All of its nodes were asked to end. It continues from `step` when there are nodes again."""

    phase: ClassVar = JobPhase.SUSPENDED
    awaited: AwaitedNodes
    at: float
    step: int = 0  # the newest complete one, on its nodes when they left or in the object store; 0 = none
    attempt: int = 0  # of that step
    returning_at: float = 0.0  # since when there are nodes again, but too few or without the step; 0 = not yet


@dataclass(frozen=True, slots=True)
class Deferred:
    """There are nodes for the job, but too little is known of its saved steps to select one."""

    phase: ClassVar = JobPhase.WAITING
    since: float
    until: float  # Unix s; then the decision is made with the known inventories
    # Digest of the known saved shards, if they were complete and the decision was to wait all the same
    known: str = ""
    planned_before: bool = False  # the newest generation was planned for the same decision, and abandoned


@dataclass(frozen=True, slots=True)
class Saving:
    """An operator stops the job, or all of its nodes leave. Its ranks save once more first."""

    phase: ClassVar = JobPhase.STOPPING
    reason: str
    at_step: int  # the checkpoint that it waits for
    suspends: bool = False  # the job continues when there are nodes again


@dataclass(frozen=True, slots=True)
class Stopping:
    """An operator stops the job, or all of its nodes leave. Stop orders were sent."""

    phase: ClassVar = JobPhase.STOPPING
    reason: str
    stops: Mapping[str, str] = field(default_factory=dict)  # order id → node
    suspends: bool = False  # as in `Saving`


@dataclass(frozen=True, slots=True)
class Stopped:
    phase: ClassVar = JobPhase.STOPPED


@dataclass(frozen=True, slots=True)
class Completed:
    """Every rank ended with exit code 0."""

    phase: ClassVar = JobPhase.COMPLETED
    upload: FinalUpload | None = None  # None = there was nothing to upload


@dataclass(frozen=True, slots=True)
class Failed:
    """Ended by a decision: the `stop` action, or repeated failures to start."""

    phase: ClassVar = JobPhase.FAILED
    permanent: bool = False  # the script's own error: another attempt would fail in the same way


Doing = (
    Pending
    | Preparing
    | Starting
    | Replanning
    | Resetting
    | Running
    | Waiting
    | Suspended
    | Deferred
    | Saving
    | Stopping
    | Stopped
    | Completed
    | Failed
)
CHANGING = (Preparing, Starting)  # a change is in flight

# ---------------------------------------------------------------- the transitions


class Cause(StrEnum):
    """Why a job changes its state."""

    PLAN = "a generation is planned"
    START = "every node is prepared"
    STEP = "every rank has stepped"
    GIVE_UP = "a fault strikes the change"
    RESET = "GPUs are to be reset"
    CANNOT_START = "no nodes to start on"
    CANNOT_RUN = "no nodes to go on with"
    DEFER = "saved steps are not known yet"
    SAVE = "ends with a last save"
    STOP = "its workers are to end"
    STOPPED = "all workers are gone"
    SUSPEND = "all of its nodes leave"
    COMPLETE = "all ranks ended well"
    FAIL = "ended by a decision"
    SUBMIT = "submitted again"


Transitions = Mapping[Cause, type[Doing]]

_ANY: Transitions = {
    Cause.PLAN: Preparing,
    Cause.DEFER: Deferred,
    Cause.RESET: Resetting,
    Cause.STOP: Stopping,
    Cause.FAIL: Failed,
}
_AGAIN: Transitions = {Cause.SUBMIT: Pending}
TRANSITIONS: Mapping[type[Doing], Transitions] = {
    Pending: {**_ANY, Cause.CANNOT_START: Pending},
    Preparing: {
        **_ANY,
        Cause.START: Starting,
        Cause.GIVE_UP: Replanning,
        Cause.CANNOT_START: Pending,
        Cause.CANNOT_RUN: Waiting,
    },
    Starting: {
        **_ANY,
        Cause.STEP: Running,
        Cause.GIVE_UP: Replanning,
        Cause.CANNOT_RUN: Waiting,
        Cause.COMPLETE: Completed,
    },
    Replanning: {
        **_ANY,
        Cause.CANNOT_START: Pending,
        Cause.CANNOT_RUN: Waiting,
        Cause.COMPLETE: Completed,
    },
    Resetting: {
        **_ANY,
        Cause.GIVE_UP: Replanning,
        Cause.CANNOT_START: Pending,
        Cause.CANNOT_RUN: Waiting,
        Cause.COMPLETE: Completed,
    },
    Running: {**_ANY, Cause.CANNOT_RUN: Waiting, Cause.SAVE: Saving, Cause.COMPLETE: Completed},
    Waiting: {**_ANY, Cause.CANNOT_RUN: Waiting, Cause.SUSPEND: Suspended, Cause.COMPLETE: Completed},
    Suspended: {**_ANY, Cause.CANNOT_RUN: Waiting, Cause.COMPLETE: Completed},
    Deferred: {
        **_ANY,
        Cause.CANNOT_START: Pending,
        Cause.CANNOT_RUN: Waiting,
        Cause.COMPLETE: Completed,
    },
    Saving: {Cause.STOP: Stopping, Cause.STOPPED: Stopped, Cause.COMPLETE: Completed},
    Stopping: {Cause.STOPPED: Stopped, Cause.SUSPEND: Suspended},
    Stopped: _AGAIN,
    Completed: _AGAIN,
    Failed: _AGAIN,
}


class IllegalTransition(Exception):
    """The table has no such transition: a bug in the caller."""


def check(job: str, doing: Doing, cause: Cause, then: Doing) -> None:
    """Raises `IllegalTransition` unless `cause` leads from the state of `doing` to that of `then`."""
    legal = TRANSITIONS[type(doing)].get(cause)
    if legal is not type(then):
        allowed = ", ".join(each.name for each in TRANSITIONS[type(doing)])
        raise IllegalTransition(
            f"{job} is {type(doing).__name__}: {cause.name} ({cause}) does not lead to {type(then).__name__} from there; "
            f"it may be followed by {allowed}"
        )
