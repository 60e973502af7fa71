"""Everything that the supervisor knows, as values. A snapshot of it is what a standby carries on from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from zlib import crc32

from holdfast.domain.evolve import evolve
from holdfast.domain.findings import Finding
from holdfast.domain.generations import ShardRecord
from holdfast.domain.incidents import Incident
from holdfast.domain.nodes import (
    TERMINATION,
    NodeFacts,
    NodeState,
    Notice,
    Preflight,
    RunningWorker,
    TemplateState,
    WorkerEnded,
)
from holdfast.domain.numbers import Numbers
from holdfast.policy import MAINTENANCE_LEAD_S
from holdfast.supervisor.core.holddown import Probation, Removal
from holdfast.supervisor.core.index import Index
from holdfast.supervisor.core.job import Job
from holdfast.supervisor.core.links import LinkTest
from holdfast.supervisor.core.offenders import Fault
from holdfast.supervisor.link_rules import LinkRules
from holdfast.supervisor.offender_rules import OffenderRules
from holdfast.supervisor.protocol import Broadcast, Send
from holdfast.supervisor.return_rules import ReplacementRules, ReturnRules
from holdfast.supervisor.timers import Timer

HEARD_GROUPS = 128  # rows of `State.heard`: of 12,500 nodes a row has a hundred


@dataclass(frozen=True, slots=True)
class Config:
    """The supervisor's own limits. Data in the state, so that a replay decides as the run did."""

    witness_s: float = 2.0  # a lost-node finding and the end of the node's control session belong together within it
    session_s: float = 5.0  # after a change of leader: a node that has not said Hello by then has no session
    missing_s: float = 3.0  # a rank that has no process, as its node reports, is a fault by itself after this long
    away_s: float = 15.0  # a member without a session, whose job finishes no step, is lost after this long
    alone_s: float = 60.0  # … when no other node of its job can testify, and diagnostics has no step of it of it either
    diagnostics_s: float = 10.0  # diagnostics is at work when something came from it within this long
    stepping_s: float = 2.0  # ranks report their own first steps sooner than this after others have seen them
    look_again_s: float = 1.0  # what should run is compared with what runs this often while the two differ
    step_late_s: float = 2.0  # a finished step may be reported this long after its end
    lost_after_s: float = 5.0  # a node without ranks is published as lost after this long without a session
    change_grace_s: float = 0.5  # how long a node that disconnects during Prepare may take to reconnect
    inventory_s: float = 2.0  # a node that just connected has this long to say which shards it holds
    scratch_s: float = 60.0  # saved steps exist, none is complete on the nodes at hand: wait this long for the others
    unrestorable_s: float = 30.0  # a step that could not be restored is passed over for this long, longer every time
    store_patience: float = 10.0  # times the job's prepare timeout, when it restores from the object store
    fence_s: float = 10.0  # every node of a generation vanished at once: wait this long before another one starts
    reset_command_s: float = 90.0  # the command that resets GPUs of a node may take this long,
    reset_s: float = 240.0  # … and all of it, from the decision to the node's tests, this long
    policy_s: float = 5.0  # no answer from the policy: the default decides
    merge_s: float = 1.0  # a node fault this close to a worker fault is its root
    degraded_start_s: float = 60.0  # a new job waits this long for its full mesh, then starts with what there is
    save_s: float = 10.0  # a planned change waits this long for the checkpoint that it asked for
    save_tries_max: int = 3
    planned_pause_s: float = 30.0  # after a planned change that did not come about, before the next try
    blind_progress_s: float = 300.0  # a script that reports no steps has made progress when it ran this long
    report_s: float = 5.0  # a checkpoint that was asked for may travel on for this long before it is reported,
    report_store_s: float = 300.0  # … and for this long to an object store whose speed is not known yet
    retention_s: float = 2.0  # after a save: how far the one before it has come is looked at, and told to the nodes
    notice_lead_s: float = MAINTENANCE_LEAD_S  # this long before maintenance starts, a decision to stay is made again
    warning_holds_s: float = (
        7200.0  # a warning that is not repeated for so long is forgotten; detectors repeat by 600 s
    )
    loan_settles_s: float = 10.0  # a job lacks nodes for so long before it asks for replicas of others
    loan_look_s: float = 15.0  # … and so often it is looked whether it does
    loan_gap_s: float = 600.0  # a job is asked for replicas at most this often, and not sooner after a planned change
    loan_unused_s: float = 3600.0  # a job that did not take the nodes that it was given asks nobody for so long
    kept_s: float = 120.0  # nodes that a job is about to take are kept for it for so long
    change_unmeasured_s: float = 60.0  # assumed cost of a planned change before the job's first one
    suspend_margin_s: float = (
        5.0  # before its nodes end, the workers of a job that is to be suspended stop, saved or not
    )
    suspended_holders_s: float = 300.0  # nodes are there again: a suspended job waits this long for those with its step
    notice_hold_s: float = 3600.0  # a notice holds this long after its start, unless it is withdrawn
    stop_grace_s: float = 5.0  # workers may save before they are killed, when an operator stops a job
    breaker_failed_nodes_min: int = 2  # breaker: so many failed nodes are always acceptable
    breaker_failed_fraction_max: float = 0.3  # breaker: of the nodes that are connected
    changes_max: int = 30  # breaker: so many generation changes of the fleet within the window are always acceptable
    changes_per_job_max: float = 3.0  # … and so many per job: what 30 mean depends on whether 3 jobs run or 1,500
    breaker_window_s: float = 300.0
    closed_incidents_max: int = 100
    finished_jobs_max: int = 100
    lost_nodes_max: int = 1000
    findings_per_incident_max: int = 64
    lineage_max: int = 64
    stored_max: int = 8  # steps in the object store that are remembered per job
    passed_over_max: int = 16
    reports_max: int = 8  # checkpoints of a job that operators wait for
    offenders: OffenderRules = field(default_factory=OffenderRules)  # when a node that keeps failing is quarantined
    returns: ReturnRules = field(default_factory=ReturnRules)  # when a node that failed may have ranks again
    provider_s: float = 600.0  # who provides machines should have answered after this long
    replacements: ReplacementRules = field(default_factory=ReplacementRules)  # when another machine is asked for
    links: LinkRules = field(default_factory=LinkRules)  # when nodes without ranks test the network between them


@dataclass(frozen=True, slots=True)
class ResetDue:
    """GPUs of a node that a finding wants reset: the node gets no ranks before that is done."""

    gpus: tuple[int, ...]  # empty = which one is not known: all of the node
    cause: str  # the finding's summary
    failure: str = ""  # why the last attempt failed; it is not repeated before an operator has looked
    # Of `gpus`, those that were found since the order went out: its answer may come late, and says nothing of them.
    more: tuple[int, ...] | None = None  # None = none of them; empty as in `gpus`


@dataclass(frozen=True)
class Node:
    """`live_generations`: the generations of each job that may have live workers on this node, on which all fencing relies."""

    facts: NodeFacts
    connected: bool
    state: NodeState  # as last published
    session: int = 0
    connected_at: float = 0.0
    unheard: bool = False  # its session was an earlier leader's: the present one has not heard it yet
    gone_at: float = 0.0  # when the last session ended
    back_by: float = 0.0  # the supervisor ended it: when the next one should have begun
    last_seq: int = 0  # of this session's reports, where `State.heard` does not say
    lost: bool = False  # declared: both witnesses said so, or its incarnation is over
    unschedulable_reason: str = ""  # why the node gets no ranks; empty = it may get ranks
    repaired_at: float = 0.0  # findings about faults before it are history
    live_generations: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # job → generations, ascending
    inventory: Mapping[str, Sequence[ShardRecord]] = field(default_factory=dict)  # by job
    inventory_from: Mapping[str, int] = field(default_factory=dict)  # by job: the report that the inventory is of
    inventoried: bool = False  # this incarnation has reported an inventory
    stale_until: float = 0.0  # its inventory is of an earlier session; a newer one is worth waiting for until then
    stale_session: int = 0  # that session
    warmed: tuple[str, ...] = ()  # jobs whose modules its template was told to import
    suspicion: Finding | None = None  # diagnostics says lost, and the control session says not
    preflight: Preflight | None = None  # its newest tests of itself; None = it makes none
    known_since: float = 0.0  # when it first connected
    faults: tuple[Fault, ...] = ()  # incidents that count against it, oldest first
    quarantined: bool = False  # unschedulable because of its faults, and not by an operator or a policy
    notices: tuple[Notice, ...] = ()  # the newest of each source, withdrawals too
    workers: Sequence[RunningWorker] = field(default=())  # every living worker, as the node reported last
    workers_version: int = 0  # of that report; 0 = it does not report its workers: nothing is known of them
    workers_at: float = 0.0  # when that report was folded
    template: TemplateState | None = None  # its worker template, likewise; None = it does not say
    ended: tuple[
        WorkerEnded, ...
    ] = ()  # how ranks ended that nobody had told to stop; `ago_s` counts from `workers_at`
    reset_due: ResetDue | None = None
    reset_at: float = 0.0  # when its GPUs were last reset: findings about faults before it are history
    removal: Removal | None = (
        None  # a fault took it out, and this is how it comes back; None = an operator, or nothing did
    )
    probation: Probation | None = None  # it has come back
    booted_at: float = 0.0  # when its machine was first heard with the boot id that it has
    failed_test_at: float = (
        0.0  # by its own clock, when it last failed its tests as a suspect: an answer may come twice
    )
    failing: bool = False  # the newest tests of itself that it finished without ranks have failed
    test_failures: tuple[float, ...] = ()  # when it began to fail them, within the rules' window, oldest first
    links: tuple[LinkTest, ...] = ()  # newest tests of the network with other nodes, oldest first
    link_begun_at: float = 0.0  # when the newest one began, which may have come to no end
    refused_at: float = 0.0  # when it was last noted that it speaks for others (binding.py)
    # Since when it has ranks without a break, or had them: what tests of its network found before is history.
    ranks_at: float = 0.0
    machine_zone: str = ""  # its machine's failure domain, as the cluster's labels say; empty = not told

    @property
    def name(self) -> str:
        return self.facts.node

    @property
    def zone(self) -> str:
        """Its failure domain: as its agent was told, else as the cluster says, else its own."""
        own = self.facts.zone
        return self.machine_zone if self.machine_zone and own in ("", self.name) else own

    @property
    def unfit(self) -> str:
        """Why its own tests keep it from getting ranks; empty when they do not."""
        return self.preflight.failures if self.preflight is not None else ""

    @property
    def untested(self) -> bool:
        """It has just joined and is testing itself: not known to be healthy yet."""
        return self.preflight is not None and not self.preflight.at

    @property
    def usable(self) -> bool:
        """It may have ranks. One without a session is usable until two witnesses say that it is lost."""
        return self.in_service and self.reset_due is None

    @property
    def in_service(self) -> bool:
        """It may have ranks, once the reset of GPUs that it may need is done."""
        return not self.lost and not self.unschedulable_reason

    @property
    def told_to_end(self) -> bool:
        """Its agent ends, and its workers with it: nobody takes that back."""
        return any(each.source == TERMINATION and each.event for each in self.notices)

    @property
    def notice(self) -> Notice | None:
        """The maintenance that is announced for it; of several the one that starts first."""
        announced = (notice for notice in self.notices if notice.event)
        return min(announced, key=lambda notice: (notice.starts_at or 0.0, notice.source), default=None)


@dataclass(frozen=True, slots=True)
class Breaker:
    """One for the fleet. Open: the supervisor watches, records and does not act."""

    open_until: float | None = None
    reason: str = ""
    opened_by_node_failures: bool = False  # open because too many nodes failed within the window
    failed_nodes: tuple[tuple[float, str], ...] = ()  # (when, node) within the window
    changes: tuple[float, ...] = ()  # when, within the window

    def since(self, at: float) -> Breaker:
        """Drop entries up to and including `at`. Skips the scan when the oldest entry is newer, which is the common case when
        many nodes fail at once."""
        failed, changes = self.failed_nodes, self.changes
        if failed and failed[0][0] <= at:
            failed = tuple(item for item in failed if item[0] > at)
        if changes and changes[0] <= at:
            changes = tuple(began for began in changes if began > at)
        return evolve(self, failed_nodes=failed, changes=changes)


@lru_cache(1 << 16)
def heard_in(node: str) -> str:
    """The row of `State.heard` in which the node is."""
    return f"{crc32(node.encode()) % HEARD_GROUPS}"


def last_seq(heard: Mapping[str, Mapping[str, int]], node: Node) -> int:
    """Number of the newest report of this incarnation."""
    return heard.get(heard_in(node.name), {}).get(node.name, node.last_seq)


@dataclass(frozen=True)
class State:
    config: Config = field(default_factory=Config)
    born: float = 0.0  # time of the first event: makes ids unique even when all state was lost
    folded_at: float = 0.0  # time of the newest event that changed anything: no later leader's clock is behind it
    epoch: int = 0
    led_at: float = 0.0  # when the term began: no agent was heard by this leader before
    secret: str = ""  # of the term: in the ids of its orders
    commands: int = 0  # command ids given out
    incidents_opened: int = 0
    nodes: Mapping[str, Node] = field(default_factory=dict)
    # Newest report of each node's incarnation: by group of nodes (`heard_in`), by node. Each report changes it, and nothing
    # else of most nodes: so it is no part of their rows.
    heard: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    jobs: Mapping[str, Job] = field(default_factory=dict)
    incidents: Mapping[str, Incident] = field(default_factory=dict)  # open ones
    closed: tuple[Incident, ...] = ()  # the last ones, oldest first
    uses: int = 0  # grows when what some node can be used for may have changed
    outbox: Mapping[str, Send] = field(default_factory=dict)  # orders of single nodes not answered yet, by command id
    broadcasts: Mapping[str, Broadcast] = field(default_factory=dict)  # by job: of its newest generation
    unanswered: Mapping[str, Numbers] = field(
        default_factory=dict
    )  # by job: slots that have not answered its broadcast
    timers: Mapping[Timer, float] = field(default_factory=dict)  # → due
    questions: tuple[str, ...] = ()  # incidents whose policy has not answered yet
    breaker: Breaker = field(default_factory=Breaker)
    diagnostics_at: float = 0.0  # when something last came from diagnostics, about whatever job
    last_fault: tuple[float, str] = (0.0, "")  # when, on which node: two at once have a common cause
    replaced: tuple[float, ...] = ()  # when other machines were asked for, within a day
    index: Index | None = field(default=None, init=False, compare=False, repr=False)  # follows from the tables

    def sends(self) -> Iterator[Send]:
        """All orders that are not answered."""
        yield from self.outbox.values()
        for job, slots in self.unanswered.items():
            yield from map(self.broadcasts[job].send, slots)

    def last_seq(self, node: Node) -> int:
        return last_seq(self.heard, node)

    def indexed(self, index: Index) -> State:
        """The same state with its index."""
        return evolve(self, index=index)
