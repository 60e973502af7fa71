"""Incidents and actions: correlated findings with one root cause, and what is done about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from holdfast.domain.findings import Attribution, Remedy, Severity

REPAIR = "repair"  # capacity came back while the job runs degraded
RESIZE = "resize"  # an operator asked for another number of replicas
CORDONED = "cordon"  # an operator took an active node out of service
MAINTENANCE = "maintenance"  # the owner of an active node's machine will take it
PLANNED_KINDS = (REPAIR, RESIZE, CORDONED, MAINTENANCE)


class ActionKind(StrEnum):
    RESTART = "restart"  # new processes on the same nodes
    HOT_SWAP = "hot_swap"  # a spare takes the failed node's ranks
    SCALE_DOWN = "scale_down"  # the replica leaves; its healthy nodes become spares
    SCALE_UP = "scale_up"  # replicas return
    GPU_RESET = "gpu_reset"
    CORDON = "cordon"
    CHECKPOINT_NOW = "checkpoint_now"
    WAIT = "wait"
    STOP = "stop"
    NOTIFY = "notify"
    IGNORE = "ignore"


class IncidentState(StrEnum):
    OPEN = "open"  # found, nothing decided
    DECIDED = "decided"
    PREPARING = "preparing"
    STARTING = "starting"  # START sent, not every rank has stepped
    RESOLVED = "resolved"  # every rank has stepped, or nothing had to be done
    FAILED = "failed"  # the job was stopped because of it


@dataclass(frozen=True, slots=True)
class Action:
    """A decision. `nodes` are those it takes out of service; `reason` is one English sentence."""

    kind: ActionKind
    reason: str
    nodes: tuple[str, ...] = ()
    dp: int | None = None  # target for scale_down / scale_up; None = let the planner choose
    retry_s: float = 0.0  # wait: ask again after so long, whatever the nodes do; 0 = when they change


@dataclass(frozen=True, slots=True)
class NodeTiming:
    """Timing of one node in the change that ended an incident: of its preparation, or of the first step of its `ranks`."""

    node: str
    at: float  # end, on the clock of the node
    ranks: tuple[int, ...] = ()  # empty: preparation
    phases_s: Mapping[str, float] = field(default_factory=dict)  # of its slowest rank
    restored_from: Mapping[str, int] = field(default_factory=dict)  # shards by source


@dataclass(frozen=True, slots=True)
class Incident:
    """The record of one fault from signal to first new step. Times are Unix seconds, None = not yet."""

    id: str
    job: str
    kind: str  # the root finding's FindingKind, or "repair" / "resize" / "cordon" for planned changes
    cause: str  # one English sentence
    state: IncidentState
    generation: int  # the generation it struck
    findings: tuple[str, ...] = ()  # ids, root first
    node: str = ""
    rank: int | None = None
    gpu: int | None = None
    action: Action | None = None
    decided_by: str = ""  # "default policy", a script's path, or "operator"
    new_generation: int | None = None
    t_fault: float = 0.0
    t_detected: float = 0.0
    t_decided: float | None = None
    t_prepared: float | None = None
    t_first_step: float | None = None
    restored_step: int | None = None
    last_step: int | None = None  # newest step finished before the fault
    trace_id: str = ""
    severity: str = ""  # of the root finding; empty for planned changes
    evidence: Mapping[str, str] = field(default_factory=dict)  # of the root finding, for people
    attribution: Attribution = field(default_factory=Attribution)  # of the root finding, for decisions
    ladder: tuple[Remedy, ...] = ()  # what its detector recommends, mildest first
    confidence: float = 1.0  # of the root finding, 0 … 1
    cost_share: float | None = None  # of the job's rate, lost while the condition lasts; None = not measured
    outcome: str = ""  # one English sentence, once it is closed
    # Seconds that the slowest node or rank took: gpu_reset, self_test (before prepare, if GPUs were reset); stop, fork, stage
    # (overlapping, inside prepare); process_group, build, restore, first_step (one after the other, after START). A script
    # without the library reports none of the latter.
    phases_s: Mapping[str, float] = field(default_factory=dict)
    # How many shards came from "memory", "disk", "peer", "object store".
    restored_from: Mapping[str, int] = field(default_factory=dict)
    # Of the nodes that prepared and of those that stepped, the last ones: who the others waited for. In order of time.
    shares: tuple[NodeTiming, ...] = ()

    @property
    def closed(self) -> bool:
        return self.state in (IncidentState.RESOLVED, IncidentState.FAILED)

    @property
    def planned(self) -> bool:
        """A change that somebody wants while the run is healthy, or a warning; not a fault."""
        return self.kind in PLANNED_KINDS or self.warning

    @property
    def wants_reset(self) -> bool:
        """The mildest remedy that the root finding recommends is a reset of a GPU."""
        return self.ladder[:1] == (Remedy.RESET_GPU,)

    @property
    def warning(self) -> bool:
        """A condition that costs time, or may end the run later: the run continues whatever is decided."""
        return self.severity == Severity.WARNING

    @property
    def rework_steps(self) -> int:
        """Finished steps that have to be done again."""
        if self.restored_step is None or self.last_step is None:
            return 0
        return max(0, self.last_step - self.restored_step)
