"""What a job is doing: the states, what each of them knows, and which cause leads from one to another.

Theory of operation. `Job.doing` is one value. Its class is the state, and it has the data that this state needs and no other: a
job that waits for nodes knows which it could have had, one that is being prepared knows which orders are not answered. So a
combination that makes no sense (a change in flight of a job that is over) cannot be written down.

`Turn.move` is the only way from one state to another. It asks `TRANSITIONS`, which is the whole of it: a cause that is not
listed for a state is a bug in the caller and raises `IllegalTransition`, with the state and the cause in the message, before
anything is written. Within a state `Turn.update` replaces its data. `Job.phase`, which operators and policies see, follows from
the state. `make state-diagram` draws the table into docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from holdfast.domain.incidents import Action, NodeTiming
from holdfast.domain.numbers import Numbers
from holdfast.supervisor.core.election import Origin
from holdfast.supervisor.protocol import JobPhase

# ---------------------------------------------------------------- what states know


@dataclass(frozen=True)
class Change:
    """A change to the job's newest generation, from its plan to the first step of every rank."""

    incidents: tuple[str, ...]  # that it resolves, root cause first; empty for a first start
    began_at: float
    excluded: tuple[str, ...] = ()  # nodes that failed to prepare in this change or the ones that it replaces
    refused: bool = False  # one of them said that it cannot, or none of them prepared in time
    replans: int = 0  # changes before this one that were given up for the same reason that it began for
    origin: Origin = Origin.NOWHERE  # the farthest that a rank goes for what it restores
    saved_dp: int = 0  # replicas whose parts each rank puts together; 0 = each has its own again
    phases_s: Mapping[str, float] = field(default_factory=dict)  # slowest so far, as nodes and ranks report them
    restored_from: Mapping[str, int] = field(default_factory=dict)  # shards by source, as nodes report them
    restored_bytes: Mapping[str, int] = field(default_factory=dict)  # by source, as nodes report them
    shares: tuple[NodeTiming, ...] = ()  # of the nodes that were last, for the incidents' records
    came_back: tuple[str, ...] = ()  # nodes that connected during it with workers of another generation


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned change that waits for the checkpoint which makes it cheap."""

    incident: str
    action: Action
    at_step: int  # the checkpoint that it waits for
    tries: int = 1


@dataclass(frozen=True, slots=True)
class AwaitedNodes:
    """The decision was to wait: it is made again when there are other nodes."""

    since: float
    candidates: tuple[str, ...]  # nodes that the job could have had when it was decided
    uses: int = -1  # `State.uses` when the candidates were last compared; -1 = not yet
    for_time: bool = False  # it is tried again after a time, whatever the nodes do


@dataclass(frozen=True, slots=True)
class FinalUpload:
    """The last checkpoint of a completed job is on its way to the object store: nodes keep its files until then."""

    until: float
    step: int = 0  # that the nodes were asked to upload
    status: str = "its last save is not known yet"
    finished: bool = False


# ---------------------------------------------------------------- the states


@dataclass(frozen=True, slots=True)
class Pending:
    """It has never run."""

    phase: ClassVar = JobPhase.PENDING
    awaited: AwaitedNodes | None = None  # None: it waits for its full mesh, or for the checkpoint that it is to resume


@dataclass(frozen=True)
class Preparing:
    """Prepare orders are out to the new generation's nodes, Stop orders to those that leave."""

    phase: ClassVar = JobPhase.PREPARING
    change: Change
    stops: Mapping[str, str]  # order id → node: Stop orders that are not answered yet
    unprepared: Numbers = field(default_factory=Numbers)  # slots whose Prepare is not answered yet
    master: str = ""  # the rendezvous endpoint, once its node has named it
    fenced: bool = False  # the wait for a vanished generation is over


@dataclass(frozen=True)
class Starting:
    """The new generation was told to run."""

    phase: ClassVar = JobPhase.STARTING
    change: Change
    started_at: float
    stepping: Numbers = field(default_factory=Numbers)  # ranks that have finished a step
    stepped_at: float = 0.0  # the latest first step so far
    stepped_to: int = 0  # the newest step that all ranks which have reported have finished; 0 = none


@dataclass(frozen=True, slots=True)
class Replanning:
    """A fault struck the change in flight. It was given up, and the policy is asked again."""

    phase: ClassVar = JobPhase.PREPARING


@dataclass(frozen=True, slots=True)
class Resetting:
    """Its workers stop and GPUs of its nodes are reset. Then the next generation is planned on the same nodes."""

    phase: ClassVar = JobPhase.PREPARING
    incident: str  # whose decision this is
    nodes: tuple[str, ...]  # whose GPUs are reset
    phases_s: Mapping[str, float] = field(default_factory=dict)  # slowest so far, as nodes report them


@dataclass(frozen=True, slots=True)
class Running:
    """Every rank has stepped."""

    phase: ClassVar = JobPhase.RUNNING
    planned: Planned | AwaitedNodes | None = None  # a planned change that is wanted and has not begun


@dataclass(frozen=True, slots=True)
class Waiting:
    """It has run, and cannot run on the nodes there are."""

    phase: ClassVar = JobPhase.WAITING
    awaited: AwaitedNodes


@dataclass(frozen=True, slots=True)
class Suspended:
    """All of its nodes were told to end, and it goes on from `step` when nodes are there again."""

    phase: ClassVar = JobPhase.SUSPENDED
    awaited: AwaitedNodes
    at: float
    step: int = 0  # the newest complete one that its nodes had when they went, or that the object store has; 0 = none
    attempt: int = 0  # of that step
    returning_at: float = 0.0  # since when there are nodes again that are not enough, or do not have the step; 0 = none


@dataclass(frozen=True, slots=True)
class Deferred:
    """It could run, but too little is known of its saved steps to choose one."""

    phase: ClassVar = JobPhase.WAITING
    since: float
    until: float  # then it is decided with what is known
    # Digest of what was known of saved shards, when that was enough to decide, and the decision was to wait
    known: str = ""


@dataclass(frozen=True, slots=True)
class Saving:
    """An operator stops it, or all of its nodes leave; its ranks save once more before that."""

    phase: ClassVar = JobPhase.STOPPING
    reason: str
    at_step: int  # the checkpoint that it waits for
    suspends: bool = False  # it goes on when nodes are there again


@dataclass(frozen=True, slots=True)
class Stopping:
    """An operator stops it, or all of its nodes leave, and Stop orders are out."""

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
    upload: FinalUpload | None = None  # None = there was nothing to wait for


@dataclass(frozen=True, slots=True)
class Failed:
    """Ended by a decision."""

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
    """Why a job comes to another state."""

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
    """A bug of the caller: the table has no such transition."""


def check(job: str, doing: Doing, cause: Cause, then: Doing) -> None:
    """Raises `IllegalTransition` unless `cause` leads from the state of `doing` to that of `then`."""
    legal = TRANSITIONS[type(doing)].get(cause)
    if legal is not type(then):
        allowed = ", ".join(each.name for each in TRANSITIONS[type(doing)])
        raise IllegalTransition(
            f"{job} is {type(doing).__name__}: {cause.name} ({cause}) does not lead to {type(then).__name__} from there; "
            f"it may be followed by {allowed}"
        )
