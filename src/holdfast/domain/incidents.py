"""Incidents and actions: correlated findings with one root cause, and what is done about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Attribution, Remedy, Severity

REPAIR = "repair"  # capacity came back while the job runs degraded
RESIZE = "resize"  # an operator asked for another number of replicas
CORDONED = "cordon"  # an operator took an active node out of service
MAINTENANCE = "maintenance"  # the owner of an active node's machine will take it
LOAN = "loan"  # a job of higher priority lacks nodes: it asks for replicas of this one
PLANNED_KINDS = (REPAIR, RESIZE, CORDONED, MAINTENANCE, LOAN)

WALK_MAX = 32  # rungs that an incident remembers


class ActionKind(StrEnum):
    RESTART = "restart"  # new processes on the same nodes
    HOT_SWAP = "hot_swap"  # a spare takes the failed node's ranks
    SCALE_DOWN = "scale_down"  # the replica leaves; its healthy nodes become spares
    SCALE_UP = "scale_up"  # replicas return
    GPU_RESET = "gpu_reset"
    CORDON = "cordon"
    CHECKPOINT_NOW = "checkpoint_now"
    SET_INTERVAL = "set_interval"
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
    within_s: float = 0.0  # limit of this rung, from its decision to the first step of every rank; 0 = none of its own
    before: tuple[Action, ...] = ()  # steps that start no ranks, carried out before this action with the same decision
    fallbacks: tuple[Action, ...] = ()  # the next rungs of a recipe, in order; they have none themselves
    interval_steps: int = 0  # set_interval: a checkpoint is due at every multiple of it; 0 = as the job file says

    def then(self, action: Action) -> Action:
        """Return one rung: this step, and when it is done `action`. Raises ValueError for a recipe or a rung with a limit."""
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
            return evolve(self, reason=f"{self.reason}; then {action.reason}")  # it starts the same nodes by itself
        return evolve(action, before=(*self.before, evolve(self, before=()), *action.before))

    def within(self, seconds: float) -> Action:
        """Return this rung with a limit: every rank has finished a step so long after the decision, or the next rung follows.
        Raises ValueError for a recipe."""
        if self.fallbacks:
            raise ValueError(
                f"within({seconds:g}): a limit holds for one rung; write first.within({seconds:g}).otherwise(…)"
            )
        return evolve(self, within_s=float(seconds))

    def otherwise(self, action: Action) -> Action:
        """Return a recipe: if this is refused, fails, or takes longer than its limit, `action` (or the rungs of a recipe)."""
        return evolve(self, fallbacks=(*self.fallbacks, *action.rungs))

    @property
    def rungs(self) -> tuple[Action, ...]:
        """Every rung, this one first, none with fallbacks."""
        if not self.fallbacks:
            return (self,)
        return (evolve(self, fallbacks=()), *chain.from_iterable(each.rungs for each in self.fallbacks))

    @property
    def steps(self) -> str:
        """The actions of this rung in order, for people."""
        return " then ".join(each.kind for each in (*self.before, self))

    @property
    def recipe(self) -> str:
        """Every rung with its limit, for people: "restart within 60 s otherwise hot_swap"."""
        limits = (f" within {rung.within_s:g} s" if rung.within_s else "" for rung in self.rungs)
        return " otherwise ".join(rung.steps + limit for rung, limit in zip(self.rungs, limits, strict=True))

    def without_reasons(self) -> Action:
        """The same with no reasons: what would be done, to compare two answers."""
        return evolve(
            self,
            reason="",
            before=tuple(each.without_reasons() for each in self.before),
            fallbacks=tuple(each.without_reasons() for each in self.fallbacks),
        )


class RungEnd(StrEnum):
    """How a rung of a recipe ended."""

    REFUSED = "refused"  # impossible when it was its turn
    FAILED = "failed"
    LATE = "late"  # its limit was over
    DONE = "done"  # every rank has stepped, or what was decided needed no start
    OVERTAKEN = "overtaken"  # something else was decided, or the incident ended otherwise


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung of a recipe that was walked. Times are Unix seconds."""

    recipe: int  # 1 = the first recipe that answered the incident
    number: int  # within its recipe, from 1
    action: ActionKind
    steps: str  # the actions in order: "cordon then hot_swap"
    reason: str  # why the policy wanted it
    began_at: float
    within_s: float = 0.0
    ended_at: float | None = None  # None = it is being carried out
    end: RungEnd | None = None
    why: str = ""  # it ended so, one sentence
    nodes: tuple[str, ...] = ()  # that the policy named


@dataclass(frozen=True, slots=True)
class LoanRequest:
    """What a job of higher priority asks of this one."""

    job: str  # that lacks nodes
    priority: int  # its
    dp: int  # replicas that this one would keep
    nodes: tuple[str, ...]  # that it would give


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
    # Seconds that the slowest node or rank took: gpu_reset, self_test (before prepare, if GPUs were reset; of suspects inside
    # it); stop, fork, stage (overlapping, inside prepare); process_group, build, restore, first_step (one after the other,
    # after START). A script without the library reports none of the latter.
    phases_s: Mapping[str, float] = field(default_factory=dict)
    # How many shards came from "memory", "disk", "peer", "object store".
    restored_from: Mapping[str, int] = field(default_factory=dict)
    # Of the nodes that prepared and of those that stepped, the last ones: who the others waited for. In order of time.
    shares: tuple[NodeTiming, ...] = ()
    walk: tuple[Rung, ...] = ()  # of recipes: every rung that was tried or refused, oldest first; the newest `WALK_MAX`
    recipes_exhausted: int = 0  # recipes of which no rung was left
    loan: LoanRequest | None = None  # of an incident of kind "loan"

    @property
    def rung(self) -> Rung | None:
        """The rung that is being carried out."""
        return self.walk[-1] if self.walk and self.walk[-1].end is None else None

    def walked(self, *rungs: Rung) -> Incident:
        """This incident with more rungs in its walk."""
        return evolve(self, walk=(*self.walk, *rungs)[-WALK_MAX:])

    def rung_ended(self, at: float, end: RungEnd, why: str) -> Incident:
        """This incident, of which the rung that is being carried out has ended; itself if there is none."""
        if self.rung is None:
            return self
        return evolve(self, walk=(*self.walk[:-1], evolve(self.rung, ended_at=at, end=end, why=why)))

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
    def wants_reset_later(self) -> bool:
        """A warning that recommends a reset of a GPU at the job's next boundary: until then the run may continue."""
        return self.warning and bool(self.node) and Remedy.RESET_GPU in self.ladder

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
