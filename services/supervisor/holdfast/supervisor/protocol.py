"""What goes into the supervisor's core and what comes out. Reading this file is reading the supervisor.

Events carry `at` (Unix seconds) and nothing else tells the core the time. Commands are carried out by the shell; a timer is
a command that comes back as an event. `Outbox` commands stay in the state, and are sent again, until the agent answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.domain.findings import Finding
from holdfast.domain.generations import Generation
from holdfast.domain.incidents import Action, Incident
from holdfast.domain.job import JobSpec
from holdfast.domain.nodes import NodeState
from holdfast.domain.orders import Hello, Inventory, Order, OrderDone, RanksFinished, RanksStepping

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    at: float
    spec: JobSpec
    token: str  # random, made by the shell: the job's secret for the shard data plane


@dataclass(frozen=True, slots=True)
class JobStopRequested:
    at: float
    job: str
    reason: str
    save: bool = True  # take a last checkpoint first, when the job can


@dataclass(frozen=True, slots=True)
class CheckpointRequested:
    at: float
    job: str


@dataclass(frozen=True, slots=True)
class ResizeRequested:
    at: float
    job: str
    dp: int
    reason: str


@dataclass(frozen=True, slots=True)
class NodeCordonRequested:
    at: float
    node: str
    cordoned: bool
    reason: str


@dataclass(frozen=True, slots=True)
class NodeRepaired:
    """An operator says that the node's hardware is good again: forget the findings against it."""

    at: float
    node: str


@dataclass(frozen=True, slots=True)
class NodeReported:
    """An agent's report, numbered per incarnation; the core drops repeats."""

    at: float
    node: str
    incarnation: str
    seq: int
    report: Hello | OrderDone | RanksStepping | RanksFinished | Inventory


@dataclass(frozen=True, slots=True)
class NodeGone:
    """The control stream of this incarnation ended. Not yet a lost node: it may come back, and the run may be healthy."""

    at: float
    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class FindingArrived:
    at: float
    finding: Finding


@dataclass(frozen=True, slots=True)
class PolicyAnswered:
    """The shell evaluated the job's policy for an incident.

    `decided_by` says which policy answered, and why if it was not the user's.
    """

    at: float
    incident: str
    action: Action
    decided_by: str


@dataclass(frozen=True, slots=True)
class TimerFired:
    at: float
    name: str


Event = (
    JobSubmitted
    | JobStopRequested
    | CheckpointRequested
    | ResizeRequested
    | NodeCordonRequested
    | NodeRepaired
    | NodeReported
    | NodeGone
    | FindingArrived
    | PolicyAnswered
    | TimerFired
)

# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Send:
    """An order for an agent. `command_id` is unique for ever; the order stays in the outbox until `OrderDone`."""

    node: str
    command_id: str
    order: Order


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Ask the job's policy what to do; comes back as `PolicyAnswered`. Asked again after a change of leader: it is pure."""

    incident: str
    job: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Comes back as `TimerFired(name)` at `due`; a second one of the same name replaces the first."""

    name: str
    due: float


@dataclass(frozen=True, slots=True)
class CancelTimer:
    name: str


# What history and watchers see. One record type per kind of thing that changes.


@dataclass(frozen=True, slots=True)
class JobChanged:
    at: float
    job: str
    phase: str
    reason: str


@dataclass(frozen=True, slots=True)
class GenerationChanged:
    """`stage`: planned, prepared, started, stepping, ended."""

    at: float
    job: str
    stage: str
    generation: Generation
    reason: str


@dataclass(frozen=True, slots=True)
class IncidentChanged:
    at: float
    incident: Incident


@dataclass(frozen=True, slots=True)
class NodeChanged:
    at: float
    node: str
    state: NodeState
    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class Noted:
    """Something an operator should read that changes nothing: a finding ignored, a breaker open, a request refused."""

    at: float
    subject: str
    text: str


Record = JobChanged | GenerationChanged | IncidentChanged | NodeChanged | Noted


@dataclass(frozen=True, slots=True)
class Publish:
    record: Record


Command = Send | Evaluate | SetTimer | CancelTimer | Publish
