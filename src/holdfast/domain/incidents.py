"""Incidents (correlated findings with one root cause, or a planned change) and the actions that the policy decides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Attribution, Remedy, Severity

REPAIR = "repair"  # nodes are available again while the job runs with fewer replicas
RESIZE = "resize"  # an operator requested another number of replicas
CORDONED = "cordon"  # an operator took an active node out of service
MAINTENANCE = "maintenance"  # the owner of an active node's machine will take the machine away
LOAN = "loan"  # a job of higher priority lacks nodes and requests replicas of this job
PLANNED_KINDS = (REPAIR, RESIZE, CORDONED, MAINTENANCE, LOAN)

WALK_MAX = 32  # rungs that an incident keeps in its walk


class ActionKind(StrEnum):
    """What an action does. `holdfast policy actions` describes each. A text is equal to its member: `kind == "restart"`."""

    RESTART = "restart"  # new processes on the same nodes
    HOT_SWAP = "hot_swap"  # a spare takes over the failed node's ranks
    SCALE_DOWN = "scale_down"  # the replica is removed; its healthy nodes become spares
    SCALE_UP = "scale_up"  # replicas are added
    GPU_RESET = "gpu_reset"
    CORDON = "cordon"
    CHECKPOINT_NOW = "checkpoint_now"
    SET_INTERVAL = "set_interval"
    WAIT = "wait"
    STOP = "stop"
    NOTIFY = "notify"
    IGNORE = "ignore"


class IncidentState(StrEnum):
    OPEN = "open"  # detected, without a decision
    DECIDED = "decided"
    PREPARING = "preparing"
    STARTING = "starting"  # START was sent, not every rank has finished a step
    RESOLVED = "resolved"  # every rank has finished a step, or no action was necessary
    FAILED = "failed"  # the job was stopped because of it


@dataclass(frozen=True, slots=True)
class Action:
    """A decision. `nodes`: the nodes that the action takes out of service. `reason`: one English sentence."""

    kind: ActionKind
    reason: str
    nodes: tuple[str, ...] = ()
    dp: int | None = None  # target for scale_down / scale_up; None = the planner chooses
    retry_s: float = 0.0  # wait: ask the policy again after this time; 0 = when the nodes change
    within_s: float = 0.0  # limit of this rung, from its decision to the first step of every rank; 0 = no own limit
    before: tuple[Action, ...] = ()  # steps that start no ranks, carried out before this action with the same decision
    fallbacks: tuple[Action, ...] = ()  # the next rungs of a recipe, in order; they have no fallbacks themselves
    interval_steps: int = 0  # set_interval: a checkpoint is due at every multiple; 0 = the interval of the job file

    def then(self, action: Action) -> Action:
        """Return one rung: this step, then `action`. Raises ValueError for a recipe or a rung with a limit."""
        if self.fallbacks or action.fallbacks:
            raise ValueError(
                f"{self.kind} then {action.kind}: `then` joins the steps of one rung; write "
                "first.then(second).otherwise(fallback)"
            )
        if self.within_s or action.within_s:
            raise ValueError(
                f"{self.kind} then {action.kind}: a limit holds for the whole rung; write first.then(second).within(seconds)"
            )
        if self.kind is ActionKind.GPU_RESET and action == Action(ActionKind.RESTART, action.reason):
            return evolve(self, reason=f"{self.reason}; then {action.reason}")  # a reset includes the restart
        return evolve(action, before=(*self.before, evolve(self, before=()), *action.before))

    def within(self, seconds: float) -> Action:
        """Return this rung with a limit: if some rank has not finished a step `seconds` after the decision, the next rung
        follows. Raises ValueError for a recipe."""
        if self.fallbacks:
            raise ValueError(
                f"within({seconds:g}): a limit holds for one rung; write first.within({seconds:g}).otherwise(…)"
            )
        return evolve(self, within_s=float(seconds))

    def otherwise(self, action: Action) -> Action:
        """Return a recipe: if this action is refused, fails or exceeds its limit, `action` follows (if it is a recipe, its
        rungs)."""
        return evolve(self, fallbacks=(*self.fallbacks, *action.rungs))

    @property
    def rungs(self) -> tuple[Action, ...]:
        """All rungs, this one first, each without fallbacks."""
        if not self.fallbacks:
            return (self,)
        return (evolve(self, fallbacks=()), *chain.from_iterable(each.rungs for each in self.fallbacks))

    @property
    def steps(self) -> str:
        """The actions of this rung in order, as text for people."""
        return " then ".join(each.kind for each in (*self.before, self))

    @property
    def recipe(self) -> str:
        """All rungs with their limits, as text for people: "restart within 60 s otherwise hot_swap"."""
        limits = (f" within {rung.within_s:g} s" if rung.within_s else "" for rung in self.rungs)
        return " otherwise ".join(rung.steps + limit for rung, limit in zip(self.rungs, limits, strict=True))

    def without_reasons(self) -> Action:
        """Return the same action without reasons, to compare two answers of a policy."""
        return evolve(
            self,
            reason="",
            before=tuple(each.without_reasons() for each in self.before),
            fallbacks=tuple(each.without_reasons() for each in self.fallbacks),
        )


class RungEnd(StrEnum):
    """How a rung of a recipe ended."""

    REFUSED = "refused"  # the rung was not possible when it was tried
    FAILED = "failed"
    LATE = "late"  # the rung exceeded its limit
    DONE = "done"  # every rank has finished a step, or the action needed no start
    OVERTAKEN = "overtaken"  # another action was decided, or the incident ended for another reason


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung in the walk of an incident. Times are Unix seconds."""

    recipe: int  # 1 = the first recipe that the policy returned for the incident
    number: int  # within its recipe, from 1
    action: ActionKind
    steps: str  # the actions in order: "cordon then hot_swap"
    reason: str  # the policy's reason for the action
    began_at: float
    within_s: float = 0.0
    ended_at: float | None = None  # None = the rung is being carried out
    end: RungEnd | None = None
    why: str = ""  # why it ended in this way, one sentence
    nodes: tuple[str, ...] = ()  # nodes that the policy named


@dataclass(frozen=True, slots=True)
class LoanRequest:
    """The request of a job of higher priority (the borrower) for replicas of this job (the lender)."""

    job: str  # the borrower, which lacks nodes
    priority: int  # of the borrower
    dp: int  # replicas that the lender would keep
    nodes: tuple[str, ...]  # nodes that the lender would give up


@dataclass(frozen=True, slots=True)
class NodeTiming:
    """Timing of one node in the change that ended an incident: its preparation, or the first step of its `ranks`."""

    node: str
    at: float  # end of the preparation or of the first step, by the clock of the node
    ranks: tuple[int, ...] = ()  # empty: preparation
    phases_s: Mapping[str, float] = field(default_factory=dict)  # of its slowest rank
    restored_from: Mapping[str, int] = field(default_factory=dict)  # shards by source


@dataclass(frozen=True, slots=True)
class Incident:
    """The record of one fault, or of one planned change, from the signal to the first new step. Times are Unix seconds; None =
    not reached yet."""

    id: str
    job: str
    kind: str  # the root finding's FindingKind, or "repair" / "resize" / "cordon" for planned changes
    cause: str  # one English sentence
    state: IncidentState
    generation: int  # the generation in which the fault occurred
    findings: tuple[str, ...] = ()  # ids, root first
    node: str = ""
    rank: int | None = None
    gpu: int | None = None
    action: Action | None = None
    decided_by: str = ""  # "default policy", a script's path, or "operator"
    new_generation: int | None = None
    fault_at: float = 0.0
    detected_at: float = 0.0
    decided_at: float | None = None
    prepared_at: float | None = None
    first_step_at: float | None = None
    restored_step: int | None = None
    last_step: int | None = None  # newest step finished before the fault
    trace_id: str = ""
    severity: str = ""  # of the root finding; empty for planned changes
    evidence: Mapping[str, str] = field(default_factory=dict)  # of the root finding, for people
    attribution: Attribution = field(default_factory=Attribution)  # of the root finding, for decisions
    recommended_actions: tuple[Remedy, ...] = ()  # actions that the detector recommends, least disruptive first
    confidence: float = 1.0  # of the root finding, 0 … 1
    cost_share: float | None = None  # share of the job's rate lost while the condition lasts; None = not measured
    outcome: str = ""  # one English sentence, when the incident is closed
    # Duration in seconds of each phase on the slowest node or rank. Before prepare: gpu_reset, self_test (if GPUs were reset).
    # Inside prepare, overlapping: stop, fork, stage, and self_test of suspects. After START, one after the other:
    # script (until it calls the library: imports, data), process_group, build, restore, first_step; a script without the
    # library reports none of these five.
    phases_s: Mapping[str, float] = field(default_factory=dict)
    # Number of shards that were restored from "memory", "disk", "peer", "object store".
    restored_from: Mapping[str, int] = field(default_factory=dict)
    # The last nodes to prepare, and the last nodes to finish a step: the nodes that the others waited for. In order of time.
    shares: tuple[NodeTiming, ...] = ()
    walk: tuple[Rung, ...] = ()  # rungs of recipes that were tried or refused, oldest first; the newest `WALK_MAX`
    recipes_exhausted: int = 0  # recipes whose rungs have all been tried
    loan: LoanRequest | None = None  # for an incident of kind "loan"

    @property
    def rung(self) -> Rung | None:
        """The rung that is being carried out."""
        return self.walk[-1] if self.walk and self.walk[-1].end is None else None

    def walked(self, *rungs: Rung) -> Incident:
        """Return this incident with more rungs in its walk."""
        return evolve(self, walk=(*self.walk, *rungs)[-WALK_MAX:])

    def rung_ended(self, at: float, end: RungEnd, why: str) -> Incident:
        """Return this incident with its current rung marked as ended; the incident itself if no rung is being carried out."""
        if self.rung is None:
            return self
        return evolve(self, walk=(*self.walk[:-1], evolve(self.rung, ended_at=at, end=end, why=why)))

    @property
    def closed(self) -> bool:
        return self.state in (IncidentState.RESOLVED, IncidentState.FAILED)

    @property
    def planned(self) -> bool:
        """A planned change of a healthy run, or a warning; not a fault."""
        return self.kind in PLANNED_KINDS or self.warning

    @property
    def wants_reset(self) -> bool:
        """The least disruptive action that the root finding recommends is a reset of a GPU."""
        return self.recommended_actions[:1] == (Remedy.RESET_GPU,)

    @property
    def wants_replacement(self) -> bool:
        """Nothing less than another node is recommended, such as for a hang that waits for a node without contact."""
        return self.recommended_actions[:1] == (Remedy.REPLACE_NODE,) and bool(self.node)

    @property
    def wants_reset_later(self) -> bool:
        """A warning that recommends a reset of a GPU when the job next stops; the run may continue until then."""
        return self.warning and bool(self.node) and Remedy.RESET_GPU in self.recommended_actions

    @property
    def warning(self) -> bool:
        """A condition that costs time, or may end the run later. The run continues whatever the policy decides."""
        return self.severity == Severity.WARNING

    @property
    def rework_steps(self) -> int:
        """Finished steps that have to be repeated."""
        if self.restored_step is None or self.last_step is None:
            return 0
        return max(0, self.last_step - self.restored_step)
