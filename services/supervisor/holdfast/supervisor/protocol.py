"""The events that the supervisor's core takes and the commands that it returns. This file is the core's whole interface.

Every event carries `at` (Unix seconds); the core has no other clock. The shell carries out the commands. A timer is a command
that comes back as an event. An order (`Send`, `Broadcast`) stays in the state, and is sent again, until the agent answers it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.construct import constructor_of
from holdfast.domain.evolve import evolve
from holdfast.domain.faults import FaultKind
from holdfast.domain.findings import Finding
from holdfast.domain.generations import Generation, Placement, RestoreRun, ShardSource, StoredStep
from holdfast.domain.incidents import Action, Incident
from holdfast.domain.job import JobSpec, PolicySpec
from holdfast.domain.nodes import NodeState
from holdfast.domain.numbers import Numbers
from holdfast.domain.orders import FirstStepsRecorded, Order, Prepare, Report, Start, StepReached
from holdfast.domain.replication import CommonCheckpoint
from holdfast.supervisor.link_rules import LinkRules
from holdfast.supervisor.offender_rules import OffenderRules
from holdfast.supervisor.return_rules import ReplacementRules, ReturnRules
from holdfast.supervisor.timers import Timer


class JobPhase(StrEnum):
    PENDING = "pending"  # it has never started: nodes are missing, and the reason says how many
    PREPARING = "preparing"  # a generation is being prepared on its nodes
    STARTING = "starting"  # Start orders were sent; not every rank has finished a step
    RUNNING = "running"
    WAITING = "waiting"  # it has run and cannot run now; the reason says what it waits for
    # all of its nodes were asked to end; it continues from a saved step when there are nodes again
    SUSPENDED = "suspended"
    STOPPING = "stopping"
    STOPPED = "stopped"  # an operator stopped it
    COMPLETED = "completed"  # every rank ended with exit code 0
    FAILED = "failed"  # ended by a decision; the reason is that of the last incident

    @property
    def finished(self) -> bool:
        return self in (JobPhase.STOPPED, JobPhase.COMPLETED, JobPhase.FAILED)


class GenerationStage(StrEnum):
    """Progress of a generation, as records report it."""

    PLANNED = "planned"  # Prepare orders were sent
    PREPARED = "prepared"  # every node has its workers, and no older generation runs
    STARTED = "started"  # Start orders were sent
    STEPPING = "stepping"  # every rank has finished a step
    ENDED = "ended"


class StartFrom(StrEnum):
    """How a submission treats the checkpoints that exist under the job's name."""

    NOTHING = ""  # the default: the submission is refused if there are any
    CHECKPOINT = "checkpoint"  # continue from one of them
    SCRATCH = "scratch"  # start at step 0, and keep them


@dataclass(frozen=True, slots=True)
class _Dated:
    """Base of the events and of the records."""

    at: float  # Unix seconds


@dataclass(frozen=True, slots=True)
class _OfJob(_Dated):
    job: str


@dataclass(frozen=True, slots=True)
class _OfNode(_Dated):
    node: str


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class LeaderStarted(_Dated):
    """First event of every term: a supervisor became the leader and loaded this state.

    The core answers with all that its predecessor may have committed but not carried out: orders, timers, policy questions.
    """

    epoch: int
    secret: str = ""  # random, made by the shell, so that nobody else can guess the ids of this term's orders
    # This supervisor's settings, which replace those in the state.
    returns: ReturnRules | None = None
    replacements: ReplacementRules | None = None
    links: LinkRules | None = None
    offenders: OffenderRules | None = None


@dataclass(frozen=True, slots=True)
class JobSubmitted(_Dated):
    spec: JobSpec
    token: str  # random, made by the shell: the job's secret for the shard data plane
    resumed: StoredStep | None = None  # the checkpoint that `spec.resume` names; None = start at step 0
    start: StartFrom = StartFrom.NOTHING
    step: int | None = None  # the saved step to continue from; None = the newest complete one
    # in the object store under this name: the requested step, or else the newest complete one
    found: StoredStep | None = None
    launcher: str = ""  # digest of the token by which the launcher finds its job again; empty = no launcher
    owner: str = ""  # name of the API's token that it was submitted with; empty = without one


@dataclass(frozen=True, slots=True)
class JobStopRequested(_OfJob):
    reason: str
    save: bool = True  # take a last checkpoint first, when the job can


@dataclass(frozen=True, slots=True)
class CheckpointRequested(_OfJob):
    operation: str = ""  # answered when the tiers that the checkpoint reached are known; empty = no client waits
    grace_s: float = 0.0  # answer after this long at the latest; 0 = when all copies are made


@dataclass(frozen=True, slots=True)
class FaultRequested(_OfJob):
    """A request to inject a fault, to test the recovery of a job that allows it. The node's agent decides and answers.

    The leader carries out a fault of the control plane itself. Before the request is folded, its shell sets `refusal`."""

    kind: FaultKind
    rank: int  # 0 for a fault of the control plane
    for_s: float
    xid: int = 0
    operation: str = ""
    loss_percent: float = 0.0
    offset_s: float = 0.0
    refusal: str | None = None  # for a fault of the control plane; None = not examined by a leader yet, empty = allowed


@dataclass(frozen=True, slots=True)
class PruneRequested(_OfJob):
    """Delete these saved steps, (attempt, step), from the nodes."""

    steps: tuple[CheckpointId, ...]


@dataclass(frozen=True, slots=True)
class ResizeRequested(_OfJob):
    dp: int
    reason: str


@dataclass(frozen=True, slots=True)
class PolicyChangeRequested(_OfJob):
    """From now on, another policy decides the job's incidents."""

    policy: PolicySpec


@dataclass(frozen=True, slots=True)
class NodeCordonRequested(_OfNode):
    cordoned: bool
    reason: str


@dataclass(frozen=True, slots=True)
class AgentRestartRequested(_OfNode):
    """Request to replace the agent of a node without ranks by a new one."""

    reason: str


@dataclass(frozen=True, slots=True)
class NoticeRequested(_OfNode):
    """A maintenance notice for a node's machine, or its withdrawal."""

    source: str  # a later notice of the same source replaces this one
    event: str  # what will happen, in a few words; empty = the notice of this source is withdrawn
    starts_at: float | None = None  # Unix seconds; None = at any moment


@dataclass(frozen=True, slots=True)
class MachineLabelled(_OfNode):
    """The cluster reports the failure domain of a node's machine."""

    zone: str  # failure domain


@dataclass(frozen=True, slots=True)
class MachineDeleted(_OfNode):
    """The cluster no longer has this machine. If the node is not lost, it is kept."""

    reason: str


@dataclass(frozen=True, slots=True)
class NodeRepaired(_OfNode):
    """An operator marked the node's hardware as repaired: earlier findings against it no longer count."""


@dataclass(frozen=True, slots=True)
class NodeReported:
    """An agent's report. The shell sets the node and incarnation from the control session. Numbers grow within a session, and
    the core drops repeats.

    First steps in a heartbeat have the number 0. They do not come from the event log: if the leader ends, they are lost, and
    the agent reports them again, as it does until the commit that contains them is confirmed (`FirstStepsRecorded`)."""

    at: float
    node: str
    incarnation: str
    seq: int
    report: Report
    session: int = 0  # grows from session to session of a node, over all terms; 0 = unknown


node_reported = constructor_of(NodeReported)


@dataclass(frozen=True, slots=True)
class NodeGone(_OfNode):
    """The control session of this incarnation ended. The node is not lost yet: it may reconnect, and the run may be healthy."""

    incarnation: str
    session: int = 0  # the session that ended; newer sessions of the node are not affected
    renewed: bool = False  # the supervisor ended it so that the agent opens another one: no sign of a loss


@dataclass(frozen=True, slots=True)
class StepsCompleted(_OfJob):
    """Every rank has finished `step` and all steps before it. From the steps stream, coalesced to the newest step."""

    generation: int
    step: int
    ended_at: float = 0.0  # Unix s, when the last rank finished it; 0 = unknown
    tokens: int = 0  # of the coalesced steps together
    step_s: float = 0.0  # median step time of the coalesced steps; 0 = unknown
    saves: int = 0  # number of the coalesced steps that were followed by a checkpoint
    stall_s: float = 0.0  # mean time for which each of these checkpoints blocked the slowest rank
    age_s: float = 0.0  # since it was published, as the log measured it
    loss: float | None = None  # of the newest step that reported one
    pace_s: float = 0.0  # median time from the end of one step to the end of the next; 0 = unknown


@dataclass(frozen=True, slots=True)
class StepSeen(_Dated):
    """A heartbeat of a node reports the newest step of its ranks. It does not come from the event log: the shell passes it on
    only when the core needs to know, and it is lost if the leader ends."""

    reached: StepReached
    node: str = ""  # that sent the heartbeat


@dataclass(frozen=True, slots=True)
class StartsSeen(_OfJob):
    """Heartbeats of these slots' nodes report that the ranks of a generation were started: they answer its `Start`. Like
    `StepSeen`, it is lost if the leader ends; the next leader sends the order again."""

    generation: int
    slots: Numbers


@dataclass(frozen=True, slots=True)
class FindingArrived(_Dated):
    """`finding` is dated by its publisher's clock. The core uses the measured age, `age_s`, instead."""

    finding: Finding
    age_s: float = 0.0  # since its detection: the time it waited at the publisher and in the event log


@dataclass(frozen=True, slots=True)
class PolicyAnswered(_Dated):
    """The shell evaluated the job's policy for an incident.

    `decided_by` says which policy answered, and why if it was not the user's.
    """

    incident: str
    action: Action
    decided_by: str


@dataclass(frozen=True, slots=True)
class ProviderAnswered(_OfNode):
    """The provider of machines answered a replacement request. `ok`: it accepted the request; the new machine comes later."""

    request: str  # of `RequestReplacement`
    ok: bool
    reason: str  # what it did, or why it did not


@dataclass(frozen=True, slots=True)
class MoreNodesRequested(_Dated):
    """The provider of machines answered a request for more nodes. It is recorded; no decision depends on it."""

    jobs: tuple[str, ...]  # that lack nodes
    wanted: int  # number of nodes that the jobs need in total
    reason: str
    ok: bool
    said: str


@dataclass(frozen=True, slots=True)
class BreakerResetRequested(_Dated):
    """An operator closes the circuit breaker: automatic actions resume."""

    reason: str


@dataclass(frozen=True, slots=True)
class InviteMade(_Dated):
    """An administrator invites machines to become nodes."""

    invite: str  # id
    digest: str  # SHA-256 of its token
    node: str  # empty = any
    uses: int  # number of nodes
    ttl_s: float
    by: str = ""  # name of the API's token


@dataclass(frozen=True, slots=True)
class InviteRevoked(_Dated):
    invite: str


@dataclass(frozen=True, slots=True)
class InviteUsed(_Dated):
    """A machine has shown the token of an invitation, and a request for a certificate of this node that can be fulfilled."""

    invite: str
    node: str


@dataclass(frozen=True, slots=True)
class TimerFired(_Dated):
    timer: Timer


Event = (
    LeaderStarted
    | JobSubmitted
    | JobStopRequested
    | CheckpointRequested
    | PruneRequested
    | FaultRequested
    | ResizeRequested
    | PolicyChangeRequested
    | NodeCordonRequested
    | AgentRestartRequested
    | NoticeRequested
    | MachineLabelled
    | MachineDeleted
    | NodeRepaired
    | NodeReported
    | NodeGone
    | StepsCompleted
    | StepSeen
    | StartsSeen
    | FindingArrived
    | PolicyAnswered
    | ProviderAnswered
    | MoreNodesRequested
    | BreakerResetRequested
    | InviteMade
    | InviteRevoked
    | InviteUsed
    | TimerFired
)

# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Send:
    """An order to an agent. `command_id` is never used twice. The order stays in the outbox until `OrderDone`.

    If the node has no session, the shell drops the order; the core sends it again after the node's next Hello.
    """

    node: str
    command_id: str
    order: Order


SLOT_DIGITS_MAX = 9  # of a slot number in the id that an answer names


@dataclass(frozen=True, slots=True)
class Broadcast:
    """One order to every slot of a generation: the part that all slots share, and the part of each slot. The order to slot n
    has the id `command_id/n`. The broadcast stays in the state until every slot has answered it."""

    command_id: str
    order: Prepare | Start  # that of the first slot, without `restore` and `peers`
    placements: tuple[Placement, ...]  # by slot
    restore: tuple[RestoreRun, ...] = ()  # by rank; each belongs to one slot
    peers: tuple[tuple[ShardSource, ...], ...] = ()  # by slot
    suspected: Numbers = field(default_factory=Numbers)  # slots whose nodes test themselves while they prepare

    def id_of(self, slot: int) -> str:
        return f"{self.command_id}/{slot}"

    def slot_of(self, command_id: str) -> int | None:
        """The slot that the order `command_id` is for; None if it is not an order of this broadcast."""
        broadcast, _, digits = command_id.rpartition("/")
        if broadcast != self.command_id or not digits.isdecimal() or len(digits) > SLOT_DIGITS_MAX:
            return None
        slot = int(digits)
        return slot if slot < len(self.placements) else None

    def of(self, slot: int) -> tuple[tuple[RestoreRun, ...], tuple[ShardSource, ...]]:
        """The shards that the slot restores, and its peers."""
        place, restore = self.placements[slot], self.restore
        first, behind = place.first_rank, place.first_rank + place.nproc
        begin = slot  # nearly always: each slot has one run
        if not (slot < len(restore) and restore[slot].rank == first and (not slot or restore[slot - 1].rank < first)):
            begin = bisect_left(restore, first, key=_first_rank)
        end = begin
        while end < len(restore) and restore[end].rank < behind:
            end += 1
        return restore[begin:end], self.peers[slot] if self.peers else ()

    def send(self, slot: int) -> Send:
        """The order of one slot."""
        place, order = self.placements[slot], self.order
        if isinstance(order, Prepare):
            restore, peers = self.of(slot)
            budget_s = order.suspect_test_s if slot in self.suspected else 0.0
            order = evolve(
                order,
                placement=place,
                restore=tuple(chain.from_iterable(restore)),
                peers=peers,
                suspect_test_s=budget_s,
            )
        return Send(place.node, self.id_of(slot), order)


def _first_rank(run: RestoreRun) -> int:
    return run.rank


@dataclass(frozen=True, slots=True)
class Post:
    """A broadcast's orders to these slots, whose nodes have sessions. Equivalent to one `Send` per slot."""

    broadcast: Broadcast
    slots: Numbers

    def sends(self) -> Iterator[Send]:
        return map(self.broadcast.send, self.slots)


Notification = CommonCheckpoint | FirstStepsRecorded


@dataclass(frozen=True, slots=True)
class SendNotification:
    """A one-way message to these nodes. It is not acknowledged or retried, and is dropped for a node without a session."""

    nodes: tuple[str, ...]
    message: Notification


@dataclass(frozen=True, slots=True)
class RenewSession:
    """End this session of a node. The agent opens another one, in which it reports everything again."""

    node: str
    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Ask the job's policy for an action; the answer is `PolicyAnswered`. A new leader asks again: policies are pure."""

    incident: str
    job: str


@dataclass(frozen=True, slots=True)
class RequestReplacement:
    """Ask the provider for another machine; the answer is `ProviderAnswered`. This command is never issued twice: if the leader
    ends before the answer, it is unknown whether the provider received the request."""

    node: str
    request: str  # unique
    hostname: str
    address: str
    reason: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Comes back as `TimerFired(timer)` at `due`. Setting an equal timer again replaces the first."""

    timer: Timer
    due: float


@dataclass(frozen=True, slots=True)
class CancelTimer:
    timer: Timer


# Records for the history and for the event stream: one type per kind of thing that changes.


@dataclass(frozen=True, slots=True)
class JobAccepted(_OfJob):
    """First record of a run: the submitted specification. A later run under the same name has another `at`."""

    spec: JobSpec


@dataclass(frozen=True, slots=True)
class JobChanged(_OfJob):
    phase: JobPhase
    reason: str


@dataclass(frozen=True, slots=True)
class GenerationChanged(_OfJob):
    stage: GenerationStage
    generation: Generation
    reason: str
    reports_steps: bool = True  # of `STEPPING`: False = its script reports no steps, and all ranks run


@dataclass(frozen=True, slots=True)
class IncidentChanged(_Dated):
    incident: Incident


@dataclass(frozen=True, slots=True)
class NodeChanged(_OfNode):
    state: NodeState
    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class FindingJudged(_Dated):
    """A finding and what the supervisor did with it. It can be judged again; the newest record counts."""

    finding: Finding
    verdict: str  # one English sentence
    incident: str = ""  # the incident that it opened or belongs to


@dataclass(frozen=True, slots=True)
class Noted(_Dated):
    """A message for operators about something that changes no state: an open breaker, a refused request, a replanned change."""

    subject: str
    text: str


@dataclass(frozen=True, slots=True)
class PolicyChanged(_OfJob):
    """An operator gave the job another policy."""

    policy: PolicySpec


Record = (
    JobAccepted | JobChanged | GenerationChanged | IncidentChanged | NodeChanged | FindingJudged | Noted | PolicyChanged
)


@dataclass(frozen=True, slots=True)
class Publish:
    record: Record


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of a request that took time."""

    operation: str
    ok: bool
    reason: str  # one English sentence
    request: CheckpointRequested | FaultRequested


@dataclass(frozen=True, slots=True)
class CauseFault:
    """The leader causes a fault of the control plane, once. The request is answered in the same commit. If the leader ends
    before it has caused the fault, the next leader does not."""

    job: str
    kind: FaultKind  # one of `CONTROL_PLANE`


Command = (
    Send
    | Post
    | SendNotification
    | RenewSession
    | Evaluate
    | RequestReplacement
    | SetTimer
    | CancelTimer
    | Publish
    | Answer
    | CauseFault
)
