"""What goes into the supervisor's core and what comes out. Reading this file is reading the supervisor.

Events carry `at` (Unix seconds) and nothing else tells the core the time. Commands are carried out by the shell; a timer is
a command that comes back as an event. `Outbox` commands stay in the state, and are sent again, until the agent answers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.evolve import evolve
from holdfast.domain.faults import FaultKind
from holdfast.domain.findings import Finding
from holdfast.domain.generations import Generation, Placement, RestoreRun, ShardSource, StoredStep
from holdfast.domain.incidents import Action, Incident
from holdfast.domain.job import JobSpec, PolicySpec
from holdfast.domain.nodes import NodeState
from holdfast.domain.numbers import Numbers
from holdfast.domain.orders import Order, Prepare, Report, Start, StepReached
from holdfast.domain.replication import CommonCheckpoint
from holdfast.supervisor.link_rules import LinkRules
from holdfast.supervisor.offender_rules import OffenderRules
from holdfast.supervisor.return_rules import ReplacementRules, ReturnRules
from holdfast.supervisor.timers import Timer


class JobPhase(StrEnum):
    PENDING = "pending"  # not started yet: there are not enough nodes, the reason says how many are missing
    PREPARING = "preparing"  # a generation is being prepared on its nodes
    STARTING = "starting"  # its workers were told to run; not every rank has finished a step
    RUNNING = "running"
    WAITING = "waiting"  # it has run and cannot now; the reason says what it waits for
    SUSPENDED = (
        "suspended"  # all of its nodes were told to end: it goes on from a saved step when nodes are there again
    )
    STOPPING = "stopping"
    STOPPED = "stopped"  # by an operator
    COMPLETED = "completed"  # every rank ended with exit code 0
    FAILED = "failed"  # by a decision; the reason is the last incident's

    @property
    def finished(self) -> bool:
        return self in (JobPhase.STOPPED, JobPhase.COMPLETED, JobPhase.FAILED)


class GenerationStage(StrEnum):
    """How far a generation is, as records tell it."""

    PLANNED = "planned"  # Prepare orders are out
    PREPARED = "prepared"  # every node has its workers, and nothing older runs
    STARTED = "started"  # it was told to run
    STEPPING = "stepping"  # every rank has finished a step
    ENDED = "ended"


class StartFrom(StrEnum):
    """What a submission says about checkpoints that its name has already."""

    NOTHING = ""  # nothing is said: the name must not have any
    CHECKPOINT = "checkpoint"  # go on from one of them
    SCRATCH = "scratch"  # start at step 0, and keep them


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class LeaderStarted:
    """A supervisor became the leader and loaded this state: first event of every term.

    The answer is everything that its predecessor may have committed and not carried out: orders, timers, questions.
    """

    at: float
    epoch: int
    secret: str = ""  # random, made by the shell: nobody else can tell the ids of this term's orders
    returns: ReturnRules | None = None  # this supervisor's settings, in place of what the state has
    replacements: ReplacementRules | None = None  # likewise
    links: LinkRules | None = None  # likewise
    offenders: OffenderRules | None = None  # likewise


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    at: float
    spec: JobSpec
    token: str  # random, made by the shell: the job's secret for the shard data plane
    resumed: StoredStep | None = None  # what `spec.resume` was found to mean; None = it starts from step 0
    start: StartFrom = StartFrom.NOTHING
    step: int | None = None  # to go on from; None = the newest complete one
    found: StoredStep | None = (
        None  # the newest complete step, or the one asked for, that the name has in its object store
    )
    launcher: str = ""  # digest of the token with which its launcher finds it again; empty = nobody does
    owner: str = ""  # name of the API's token that it was submitted with; empty = without one


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
    operation: str = ""  # answered when it is known how far the checkpoint came; empty = nobody waits
    grace_s: float = 0.0  # … or after this long; 0 = as long as copies take


@dataclass(frozen=True, slots=True)
class FaultRequested:
    """Somebody tests the recovery of a job that allows it; the node's agent decides and answers. A fault of the control plane
    is the leader's own matter: its shell says in `refusal` why it must not be, before the request is folded."""

    at: float
    job: str
    kind: FaultKind
    rank: int  # a fault of the control plane has none: 0
    for_s: float
    xid: int = 0
    operation: str = ""
    loss_percent: float = 0.0
    offset_s: float = 0.0
    refusal: str | None = None  # of a fault of the control plane; None = no leader has examined it, empty = it may be


@dataclass(frozen=True, slots=True)
class PruneRequested:
    """Delete these saved steps, (attempt, step), from the nodes."""

    at: float
    job: str
    steps: tuple[CheckpointId, ...]


@dataclass(frozen=True, slots=True)
class ResizeRequested:
    at: float
    job: str
    dp: int
    reason: str


@dataclass(frozen=True, slots=True)
class PolicyChangeRequested:
    """The job's incidents are decided by another policy from now on."""

    at: float
    job: str
    policy: PolicySpec


@dataclass(frozen=True, slots=True)
class NodeCordonRequested:
    at: float
    node: str
    cordoned: bool
    reason: str


@dataclass(frozen=True, slots=True)
class AgentRestartRequested:
    """The agent of a node without ranks is to be replaced by a new one."""

    at: float
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class NoticeRequested:
    """Somebody who knows says that a node's machine will be taken, until when it may be used, or that it will not be taken."""

    at: float
    node: str
    source: str  # who says so: a later notice of the same source replaces this one
    event: str  # what will happen, in a few words; empty = the notice of this source is withdrawn
    starts_at: float | None = None  # Unix seconds; None = it may be any moment


@dataclass(frozen=True, slots=True)
class MachineLabelled:
    """The cluster that a node's machine belongs to says where it is."""

    at: float
    node: str
    zone: str  # failure domain


@dataclass(frozen=True, slots=True)
class MachineDeleted:
    """The cluster has no such machine any more. A node that is not lost is there all the same."""

    at: float
    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class NodeRepaired:
    """An operator says that the node's hardware is good again: forget the findings against it."""

    at: float
    node: str


@dataclass(frozen=True, slots=True)
class NodeReported:
    """An agent's report in a session of this node and incarnation, as the shell knows. Numbers grow within a session, and the
    core drops repeats."""

    at: float
    node: str
    incarnation: str
    seq: int
    report: Report
    session: int = 0  # grows from session to session of a node, over all terms; 0 = not told


@dataclass(frozen=True, slots=True)
class NodeGone:
    """The control stream of this incarnation ended. Not yet a lost node: it may come back, and the run may be healthy."""

    at: float
    node: str
    incarnation: str
    session: int = 0  # of the stream that ended; a newer session of the node is not touched by it
    renewed: bool = False  # the supervisor itself ended it, for the agent to open another one: no sign of a loss


@dataclass(frozen=True, slots=True)
class StepsCompleted:
    """Every rank has finished `step` (and all before it). Fed from the steps stream, coalesced to the newest."""

    at: float
    job: str
    generation: int
    step: int
    ended_at: float = 0.0  # Unix s, when the last rank finished it; 0 = not told
    tokens: int = 0  # of the coalesced steps together
    step_s: float = 0.0  # median step time of the coalesced steps; 0 = not told
    saves: int = 0  # how many of the coalesced steps were followed by a checkpoint,
    stall_s: float = 0.0  # and how long each stalled the slowest rank, on average
    age_s: float = 0.0  # since it was published, as the log measured it
    loss: float | None = None  # of the newest step that told one
    pace_s: float = 0.0  # median time from the end of one step to the end of the next; 0 = not told


@dataclass(frozen=True, slots=True)
class StepSeen:
    """A node's beat says how far its ranks have come. Not from the log: said only when the core needs to know, and lost with
    the leader."""

    at: float
    reached: StepReached
    node: str = ""  # whose beat it is


@dataclass(frozen=True, slots=True)
class FindingArrived:
    """`finding` is dated by its publisher's clock, `age_s` is what was measured: the core believes the latter."""

    at: float
    finding: Finding
    age_s: float = 0.0  # since it was concluded: its wait at the publisher and in the log


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
class ProviderAnswered:
    """Who provides machines was asked to replace one. `ok`: it will, or it has; that is not the new machine itself."""

    at: float
    node: str
    request: str  # of `RequestReplacement`
    ok: bool
    reason: str  # what it did, or why it did not


@dataclass(frozen=True, slots=True)
class MoreNodesRequested:
    """Who provides machines was asked for more nodes, and has answered: a record of it, on which nothing depends."""

    at: float
    jobs: tuple[str, ...]  # that lack nodes
    wanted: int  # nodes that there should be
    reason: str
    ok: bool
    said: str


@dataclass(frozen=True, slots=True)
class BreakerResetRequested:
    """An operator has looked: act again."""

    at: float
    reason: str


@dataclass(frozen=True, slots=True)
class TimerFired:
    at: float
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
    | FindingArrived
    | PolicyAnswered
    | ProviderAnswered
    | MoreNodesRequested
    | BreakerResetRequested
    | TimerFired
)

# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class Send:
    """An order for an agent. `command_id` is unique for ever; the order stays in the outbox until `OrderDone`.

    The shell drops it when the node has no session: the core sends it again after the node's next Hello.
    """

    node: str
    command_id: str
    order: Order


SLOT_DIGITS_MAX = 9  # of the number that an answer names


@dataclass(frozen=True, slots=True)
class Broadcast:
    """One order for every slot of a generation: what the slots' orders have in common, and what each has of its own. The order
    of slot n has the id `command_id/n`. It stays in the state until every slot has answered."""

    command_id: str
    order: Prepare | Start  # as the first slot's, with nothing to restore and without peers
    placements: tuple[Placement, ...]  # by slot
    restore: tuple[RestoreRun, ...] = ()  # by rank; none is of two slots
    peers: tuple[tuple[ShardSource, ...], ...] = ()  # by slot
    suspected: Numbers = field(default_factory=Numbers)  # slots whose nodes test themselves, as the order says

    def id_of(self, slot: int) -> str:
        return f"{self.command_id}/{slot}"

    def slot_of(self, command_id: str) -> int | None:
        """Of which slot this is the order, if it is one of these."""
        own, slash, digits = command_id.rpartition("/")
        if not slash or own != self.command_id or not digits.isdecimal() or len(digits) > SLOT_DIGITS_MAX:
            return None
        slot = int(digits)
        return slot if slot < len(self.placements) else None

    def of(self, slot: int) -> tuple[tuple[RestoreRun, ...], tuple[ShardSource, ...]]:
        """What the slot restores, and its peers."""
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
    """A broadcast's orders for these slots, whose nodes have sessions: as so many `Send`."""

    broadcast: Broadcast
    slots: Numbers

    def sends(self) -> Iterator[Send]:
        return map(self.broadcast.send, self.slots)


@dataclass(frozen=True, slots=True)
class SendNotification:
    """A one-way message to a node. It is not acknowledged or retried, and is dropped if the node has no session."""

    node: str
    message: CommonCheckpoint


@dataclass(frozen=True, slots=True)
class RenewSession:
    """End this session of a node: the agent opens another one, which begins with everything that it has to say."""

    node: str
    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Ask the job's policy what to do; comes back as `PolicyAnswered`. Asked again after a change of leader: it is pure."""

    incident: str
    job: str


@dataclass(frozen=True, slots=True)
class RequestReplacement:
    """Ask who provides machines for another one; comes back as `ProviderAnswered`. Never handed out twice: if the leader ends
    before the answer, nobody knows whether it was asked."""

    node: str
    request: str  # unique
    hostname: str
    address: str
    reason: str


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Comes back as `TimerFired(timer)` at `due`; a second equal one replaces the first."""

    timer: Timer
    due: float


@dataclass(frozen=True, slots=True)
class CancelTimer:
    timer: Timer


# What history and watchers see. One record type per kind of thing that changes.


@dataclass(frozen=True, slots=True)
class JobAccepted:
    """First record of a run: what was asked for. A later run under the same name has another `at`."""

    at: float
    job: str
    spec: JobSpec


@dataclass(frozen=True, slots=True)
class JobChanged:
    at: float
    job: str
    phase: JobPhase
    reason: str


@dataclass(frozen=True, slots=True)
class GenerationChanged:
    at: float
    job: str
    stage: GenerationStage
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
class FindingJudged:
    """A finding as it arrived, and what became of it. Judged again when more is known: the newest record counts."""

    at: float
    finding: Finding
    verdict: str  # one English sentence
    incident: str = ""  # that it opened, or is a part of


@dataclass(frozen=True, slots=True)
class Noted:
    """Something an operator should read that changes nothing: a breaker open, a request refused, a change planned again."""

    at: float
    subject: str
    text: str


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    """An operator gave the job another policy."""

    at: float
    job: str
    policy: PolicySpec


Record = (
    JobAccepted | JobChanged | GenerationChanged | IncidentChanged | NodeChanged | FindingJudged | Noted | PolicyChanged
)


@dataclass(frozen=True, slots=True)
class Publish:
    record: Record


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request that took time."""

    operation: str
    ok: bool
    reason: str  # one English sentence
    request: CheckpointRequested | FaultRequested


@dataclass(frozen=True, slots=True)
class CauseFault:
    """The leader causes a fault of the control plane, once; the request has been answered in the same commit. A leader that
    ends before it has done so does not leave it to the next one."""

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
