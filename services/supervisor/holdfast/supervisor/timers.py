"""The core's timers: each names a check to make at its due time. A timer is identified by its value: an equal one replaces it.

Its text, `prepare:gpt:2`, is used in logs, as the key of the snapshot's row, and to order timers that are due at the same time.
It is not parsed.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, ClassVar


class _Timer:
    __slots__ = ()
    word: ClassVar[str]

    def __str__(self) -> str:
        values = astuple(self)  # type: ignore[call-overload]
        return ":".join([self.word, *(str(value) for value in values)])

    def __lt__(self, other: Any) -> bool:
        return str(self) < str(other)


# ---------------------------------------------------------------- about a change of a job


@dataclass(frozen=True, slots=True)
class PrepareTimeout(_Timer):
    """Prepare and Stop orders of a change should have been answered."""

    word: ClassVar = "prepare"
    job: str
    generation: int


@dataclass(frozen=True, slots=True)
class FirstStepTimeout(_Timer):
    """Every rank of a generation that was started should have finished a step."""

    word: ClassVar = "start"
    job: str
    generation: int


@dataclass(frozen=True, slots=True)
class SlowStart(_Timer):
    """A generation of a job that has never stepped was started; if not every rank has stepped by now, that is a warning."""

    word: ClassVar = "slow-start"
    job: str
    generation: int


@dataclass(frozen=True, slots=True)
class FenceOver(_Timer):
    """No node of the previous generation reconnected to confirm that its workers have ended."""

    word: ClassVar = "fence"
    job: str
    generation: int


@dataclass(frozen=True, slots=True)
class FirstStepsDue(_Timer):
    """Others have reported the first step of every rank; the ranks' own reports should have arrived by now."""

    word: ClassVar = "stepping"
    job: str
    generation: int


@dataclass(frozen=True, slots=True)
class ReconnectTimeout(_Timer):
    """A member that disconnected during a change should have a session again."""

    word: ClassVar = "gone"
    job: str
    generation: int
    node: str


@dataclass(frozen=True, slots=True)
class ResetTimeout(_Timer):
    """The GPUs that a job waits for should have been reset."""

    word: ClassVar = "reset"
    job: str
    generation: int


@dataclass(frozen=True, slots=True)
class RungTimeout(_Timer):
    """Time limit of the rung that is being carried out for an incident of the job."""

    word: ClassVar = "rung"
    job: str
    incident: str


# ---------------------------------------------------------------- about a job


@dataclass(frozen=True, slots=True)
class DegradedStart(_Timer):
    """A new job has waited long enough for its full mesh."""

    word: ClassVar = "pending"
    job: str


@dataclass(frozen=True, slots=True)
class RetryDue(_Timer):
    """A job that could not be prepared is retried."""

    word: ClassVar = "retry"
    job: str


@dataclass(frozen=True, slots=True)
class DeferralOver(_Timer):
    """A deferred decision is made with the inventories that are known by now."""

    word: ClassVar = "defer"
    job: str


@dataclass(frozen=True, slots=True)
class SaveTimeout(_Timer):
    """The checkpoint that a planned change waits for should be complete."""

    word: ClassVar = "save"
    job: str


@dataclass(frozen=True, slots=True)
class PlannedChangeDue(_Timer):
    """A planned change that was postponed may be tried again."""

    word: ClassVar = "plan"
    job: str


@dataclass(frozen=True, slots=True)
class WarningDue(_Timer):
    """The policy may be asked about a warning of the job, for the first time or again."""

    word: ClassVar = "warning"
    job: str


@dataclass(frozen=True, slots=True)
class LoanDue(_Timer):
    """Check whether the job lacks nodes that jobs of lower priority could give."""

    word: ClassVar = "loan"
    job: str


@dataclass(frozen=True, slots=True)
class KeptOver(_Timer):
    """Free nodes were kept for the job long enough."""

    word: ClassVar = "kept"
    job: str


@dataclass(frozen=True, slots=True)
class StopTimeout(_Timer):
    """The last save, or the Stop orders, of a job that an operator stops should be done."""

    word: ClassVar = "stop"
    job: str


@dataclass(frozen=True, slots=True)
class FinalUploadTimeout(_Timer):
    """The last checkpoint of a completed job should be in the object store."""

    word: ClassVar = "leave"
    job: str


@dataclass(frozen=True, slots=True)
class CheckpointReportDue(_Timer):
    """An operator's checkpoint request is answered with the tiers reached so far."""

    word: ClassVar = "report"
    job: str


@dataclass(frozen=True, slots=True)
class RetentionDue(_Timer):
    """After a save: determine the newest step that all nodes have."""

    word: ClassVar = "retain"
    job: str


@dataclass(frozen=True, slots=True)
class RanksDue(_Timer):
    """Check ranks of the running generation without a worker: a fault, unless something has explained them."""

    word: ClassVar = "reconcile"
    job: str


@dataclass(frozen=True, slots=True)
class StepDue(_Timer):
    """A running job should have finished a step."""

    word: ClassVar = "still"
    job: str


# ---------------------------------------------------------------- about a node


@dataclass(frozen=True, slots=True)
class WitnessTimeout(_Timer):
    """One witness lost the node: check whether the other one did, too."""

    word: ClassVar = "witness"
    node: str


@dataclass(frozen=True, slots=True)
class LostTimeout(_Timer):
    """A node without ranks has had no session for a while."""

    word: ClassVar = "lost"
    node: str


@dataclass(frozen=True, slots=True)
class NoticeDue(_Timer):
    """The maintenance of a node starts soon, or its notice has expired."""

    word: ClassVar = "notice"
    node: str


@dataclass(frozen=True, slots=True)
class ReturnDue(_Timer):
    """The hold-down of a node, or its probation, is over."""

    word: ClassVar = "return"
    node: str


@dataclass(frozen=True, slots=True)
class RebootDue(_Timer):
    """The obstacle to a node's boot may be gone, or the node should have booted."""

    word: ClassVar = "reboot"
    node: str


@dataclass(frozen=True, slots=True)
class ReplacementDue(_Timer):
    """The node has been out of service for long enough, or the obstacle to its replacement may be gone, or the provider should
    have answered."""

    word: ClassVar = "replace"
    node: str


@dataclass(frozen=True, slots=True)
class LinkTestTimeout(_Timer):
    """The network test between two nodes should be over."""

    word: ClassVar = "link"
    node: str  # the node that measures
    partner: str


# ---------------------------------------------------------------- about the fleet


@dataclass(frozen=True, slots=True)
class LinkTestsDue(_Timer):
    """Nodes without ranks may begin network tests."""

    word: ClassVar = "links"


@dataclass(frozen=True, slots=True)
class PolicyTimeout(_Timer):
    """The policy should have answered."""

    word: ClassVar = "policy"
    incident: str


@dataclass(frozen=True, slots=True)
class SessionsTimeout(_Timer):
    """Agents should have reconnected to the leader of this epoch."""

    word: ClassVar = "sessions"
    epoch: int
    since: float  # when the term began


@dataclass(frozen=True, slots=True)
class BreakerWindowOver(_Timer):
    """The circuit breaker closes by itself."""

    word: ClassVar = "breaker"


OfJob = (
    PrepareTimeout
    | FirstStepTimeout
    | FenceOver
    | SlowStart
    | FirstStepsDue
    | ReconnectTimeout
    | ResetTimeout
    | RungTimeout
    | DegradedStart
    | RetryDue
    | DeferralOver
    | SaveTimeout
    | PlannedChangeDue
    | WarningDue
    | LoanDue
    | KeptOver
    | StopTimeout
    | FinalUploadTimeout
    | CheckpointReportDue
    | RetentionDue
    | RanksDue
    | StepDue
)
Timer = (
    OfJob
    | WitnessTimeout
    | LostTimeout
    | NoticeDue
    | ReturnDue
    | RebootDue
    | ReplacementDue
    | LinkTestTimeout
    | LinkTestsDue
    | PolicyTimeout
    | SessionsTimeout
    | BreakerWindowOver
)
