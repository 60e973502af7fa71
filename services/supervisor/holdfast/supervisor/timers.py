"""The core's timers: each names a check to make at its due time. A timer is identified by its value: an equal one replaces it.

Its text, `prepare:gpt:2`, is used in logs, as the key of the snapshot's row, and to order timers that are due at the same time.
It is not parsed.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class _Timer:
    """A kind of timer without fields of its own is a plain subclass, which is a frozen dataclass with those of its base."""

    word: ClassVar[str]

    def __str__(self) -> str:
        return ":".join([self.word, *map(str, astuple(self))])

    def __lt__(self, other: Any) -> bool:
        return str(self) < str(other)


@dataclass(frozen=True, slots=True)
class OfJob(_Timer):
    job: str


@dataclass(frozen=True, slots=True)
class _OfGeneration(OfJob):
    generation: int


@dataclass(frozen=True, slots=True)
class _OfNode(_Timer):
    node: str


# ---------------------------------------------------------------- about a change of a job


class PrepareTimeout(_OfGeneration):
    """Prepare and Stop orders of a change should have been answered."""

    word = "prepare"


class FirstStepTimeout(_OfGeneration):
    """Every rank of a generation that was started should have finished a step."""

    word = "start"


class SlowStart(_OfGeneration):
    """A generation of a job that has never stepped was started; if not every rank has stepped by now, that is a warning."""

    word = "slow-start"


class FenceOver(_OfGeneration):
    """No node of the previous generation reconnected to confirm that its workers have ended."""

    word = "fence"


class FirstStepsDue(_OfGeneration):
    """Others have reported the first step of every rank; the ranks' own reports should have arrived by now."""

    word = "stepping"


@dataclass(frozen=True, slots=True)
class ReconnectTimeout(_OfGeneration):
    """A member that disconnected during a change should have a session again."""

    word: ClassVar = "gone"
    node: str


class ResetTimeout(_OfGeneration):
    """The GPUs that a job waits for should have been reset."""

    word = "reset"


@dataclass(frozen=True, slots=True)
class RungTimeout(OfJob):
    """Time limit of the rung that is being carried out for an incident of the job."""

    word: ClassVar = "rung"
    incident: str


# ---------------------------------------------------------------- about a job


class DegradedStart(OfJob):
    """A new job has waited long enough for its full mesh."""

    word = "pending"


class RetryDue(OfJob):
    """A job that could not be prepared is retried."""

    word = "retry"


class DeferralOver(OfJob):
    """A deferred decision is made with the inventories that are known by now."""

    word = "defer"


class SaveTimeout(OfJob):
    """The checkpoint that a planned change waits for should be complete."""

    word = "save"


class PlannedChangeDue(OfJob):
    """A planned change that was postponed may be tried again."""

    word = "plan"


class WarningDue(OfJob):
    """The policy may be asked about a warning of the job, for the first time or again."""

    word = "warning"


class LoanDue(OfJob):
    """Check whether the job lacks nodes that jobs of lower priority could give."""

    word = "loan"


class KeptOver(OfJob):
    """Free nodes were kept for the job long enough."""

    word = "kept"


class StopTimeout(OfJob):
    """The last save, or the Stop orders, of a job that an operator stops should be done."""

    word = "stop"


class FinalUploadTimeout(OfJob):
    """The last checkpoint of a completed job should be in the object store."""

    word = "leave"


class CheckpointReportDue(OfJob):
    """An operator's checkpoint request is answered with the tiers reached so far."""

    word = "report"


class RetentionDue(OfJob):
    """After a save: determine the newest step that all nodes have."""

    word = "retain"


class RanksDue(OfJob):
    """Check ranks of the running generation without a worker: a fault, unless something has explained them."""

    word = "reconcile"


class StepDue(OfJob):
    """A running job should have finished a step."""

    word = "still"


# ---------------------------------------------------------------- about a node


class WitnessTimeout(_OfNode):
    """One witness lost the node: check whether the other one did, too."""

    word = "witness"


class LostTimeout(_OfNode):
    """A node without ranks has had no session for a while."""

    word = "lost"


class NoticeDue(_OfNode):
    """The maintenance of a node starts soon, or its notice has expired."""

    word = "notice"


class ReturnDue(_OfNode):
    """The hold-down of a node, or its probation, is over."""

    word = "return"


class RebootDue(_OfNode):
    """The obstacle to a node's boot may be gone, or the node should have booted."""

    word = "reboot"


class ReplacementDue(_OfNode):
    """The node has been out of service for long enough, or the obstacle to its replacement may be gone, or the provider should
    have answered."""

    word = "replace"


@dataclass(frozen=True, slots=True)
class LinkTestTimeout(_Timer):
    """The network test between two nodes should be over."""

    word: ClassVar = "link"
    node: str  # the node that measures
    partner: str


# ---------------------------------------------------------------- about the fleet


class LinkTestsDue(_Timer):
    """Nodes without ranks may begin network tests."""

    word = "links"


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


class BreakerWindowOver(_Timer):
    """The circuit breaker closes by itself."""

    word = "breaker"


Timer = (
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
