"""The supervisor's complete state, as values. A standby continues from a snapshot of it."""

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
from holdfast.supervisor.core.model.index import Index
from holdfast.supervisor.core.model.job import Job
from holdfast.supervisor.core.model.live import Live, generations_on
from holdfast.supervisor.core.rules.holddown import Probation, Removal
from holdfast.supervisor.core.rules.links import LinkTest
from holdfast.supervisor.core.rules.offenders import Fault
from holdfast.supervisor.link_rules import LinkRules
from holdfast.supervisor.offender_rules import OffenderRules
from holdfast.supervisor.protocol import Broadcast, Send
from holdfast.supervisor.return_rules import ReplacementRules, ReturnRules
from holdfast.supervisor.timers import Timer

HEARD_GROUPS = 128  # rows of `State.heard`; with 12,500 nodes, a row has a hundred of them


@dataclass(frozen=True, slots=True)
class Config:
    """Limits of the supervisor. They are part of the state, so that a replay decides as the original run did."""

    witness_s: float = 2.0  # a lost-node finding and the end of the control session belong together within this
    session_s: float = 5.0  # after a change of leader: a node that has not sent its Hello by then has no session
    missing_s: float = 3.0  # a rank without a process, as its node reports, counts as a fault after this long
    away_s: float = 15.0  # a member without a session, whose job finishes no step, is lost after this long
    alone_s: float = 60.0  # … if no other node of the job, and not diagnostics either, can report steps of it
    diagnostics_s: float = 10.0  # diagnostics counts as working if a message from it arrived within this time
    stepping_s: float = 2.0  # time for ranks to report their first steps after diagnostics has reported the step
    look_again_s: float = 1.0  # interval of the comparison of desired and running workers while they differ
    step_late_s: float = 2.0  # a finished step may be reported this long after its end
    lost_after_s: float = 5.0  # a node without ranks is published as lost after this time without a session
    change_grace_s: float = 0.5  # how long a node that disconnects during Prepare may take to reconnect
    inventory_s: float = 2.0  # time for a node that just connected to report which shards it holds
    scratch_s: float = 60.0  # no saved step is complete on the connected nodes: wait this long for others
    unrestorable_s: float = 30.0  # a step that could not be restored is skipped for this time, longer after each try
    store_patience: float = 10.0  # factor on the job's prepare timeout for a restore from the object store
    fence_s: float = 10.0  # all nodes of a generation were lost at once: wait this long before the next starts
    reset_command_s: float = 90.0  # time for the command that resets GPUs of a node,
    reset_s: float = 240.0  # … and for the whole reset, from the decision to the node's tests
    policy_s: float = 5.0  # the default policy decides if the job's policy has not answered within this time
    merge_s: float = 1.0  # a node fault within this time of a worker fault is the root failure
    degraded_start_s: float = 60.0  # a new job waits this long for its full mesh, then starts with fewer replicas
    # A planned change or a stop waits for the checkpoint that it has asked for as long as its steps should take, and this long
    # for the save: callbacks of the script have 5 s (`run.on_leaving`), and a memory image may be read for 5 s.
    save_s: float = 10.0
    stop_save_s_max: float = 300.0  # an operator's stop waits for its checkpoint for at most this long
    save_tries_max: int = 3
    planned_pause_s: float = 30.0  # pause after a planned change that did not happen, before the next try
    blind_progress_s: float = 300.0  # a script that reports no steps counts as progressing after running this long
    report_s: float = 5.0  # time for a requested checkpoint to reach further tiers before it is reported,
    report_store_s: float = 300.0  # … if it goes to an object store whose speed is not known yet
    retention_s: float = 2.0  # after a save: the newest step that all nodes have is determined and sent to them
    notice_lead_s: float = MAINTENANCE_LEAD_S  # a decision to stay is reconsidered this long before it starts
    # a warning that is not repeated within this time is dropped; detectors repeat within 600 s
    warning_holds_s: float = 7200.0
    loan_settles_s: float = 10.0  # a job must lack nodes for this long before it asks other jobs for replicas
    loan_look_s: float = 15.0  # … and whether it does is checked this often
    loan_gap_s: float = 600.0  # a job is asked for replicas at most this often, and this long after a planned change
    loan_unused_s: float = 3600.0  # a job that did not use the nodes that it was lent asks no job for this long
    kept_s: float = 120.0  # nodes that a job is about to take are kept for it this long
    change_unmeasured_s: float = 60.0  # assumed cost of a planned change before the job's first one
    # this long before its nodes end, a job to be suspended stops its workers, saved or not
    suspend_margin_s: float = 5.0
    suspended_holders_s: float = 300.0  # nodes return: a suspended job waits this long for those that hold its step
    notice_hold_s: float = 3600.0  # a notice applies for this long after its start, unless it is withdrawn
    stop_grace_s: float = 5.0  # workers may save before they are killed, when an operator stops a job
    breaker_failed_nodes_min: int = 2  # breaker: up to this number of failed nodes is always acceptable
    breaker_failed_fraction_max: float = 0.3  # breaker: as a fraction of the connected nodes
    changes_max: int = 30  # breaker: up to this number of generation changes in the window is always acceptable
    changes_per_job_max: float = 3.0  # … and up to this number per job: 30 changes mean little if 1,500 jobs run
    breaker_window_s: float = 300.0
    closed_incidents_max: int = 100
    finished_jobs_max: int = 100
    lost_nodes_max: int = 1000
    findings_per_incident_max: int = 64
    lineage_max: int = 64
    stored_max: int = 8  # known steps in the object store, per job,
    stored_limit: int = 64  # … or as many as the store keeps, but not more than this
    passed_over_max: int = 16
    reports_max: int = 8  # checkpoints of a job that operators wait for
    offenders: OffenderRules = field(default_factory=OffenderRules)  # when a node that keeps failing is quarantined
    returns: ReturnRules = field(default_factory=ReturnRules)  # when a node that failed may have ranks again
    provider_s: float = 600.0  # time for the provider of machines to answer
    replacements: ReplacementRules = field(default_factory=ReplacementRules)  # when another machine is asked for
    links: LinkRules = field(default_factory=LinkRules)  # when nodes without ranks test the network between them


@dataclass(frozen=True, slots=True)
class ResetDue:
    """A finding demands a reset of GPUs of a node. The node gets no ranks until it is done."""

    gpus: tuple[int, ...]  # empty = the GPU is not known: all of the node
    cause: str  # the finding's summary
    failure: str = ""  # why the last attempt failed; it is not repeated until an operator acts
    # Those of `gpus` that were found after the order was sent: its answer does not cover them.
    more: tuple[int, ...] | None = None  # None = no GPU was added; empty as in `gpus`


@dataclass(frozen=True)
class Node:
    """A node. `number`: its place in sets of nodes (`State.live`); no two nodes have the same."""

    facts: NodeFacts
    connected: bool
    state: NodeState  # as last published
    session: int = 0
    connected_at: float = 0.0
    unheard: bool = False  # connected under an earlier leader and not yet reconnected to this one
    gone_at: float = 0.0  # when the last session ended
    back_by: float = 0.0  # the supervisor ended the session: when the next one should have begun
    lost: bool = False  # declared lost: both witnesses agree, or its incarnation has ended
    unschedulable_reason: str = ""  # why the node gets no ranks; empty = it may get ranks
    repaired_at: float = 0.0  # findings about earlier faults are ignored
    number: int = 0
    inventory: Mapping[str, Sequence[ShardRecord]] = field(default_factory=dict)  # by job
    inventory_from: Mapping[str, int] = field(default_factory=dict)  # by job: the number of its report
    # Jobs whose inventories its session has announced and not delivered. None = none was delivered, and it does not announce.
    announced: tuple[str, ...] | None = None
    stale_until: float = 0.0  # its inventories are from an earlier session; until then, elections wait for newer ones
    stale_session: int = 0  # that session
    warmed: tuple[str, ...] = ()  # jobs whose modules its template was ordered to import
    suspicion: Finding | None = None  # lost according to diagnostics, but its control session is open
    preflight: Preflight | None = None  # its newest pre-flight test; None = it runs none
    known_since: float = 0.0  # when it first connected
    faults: tuple[Fault, ...] = ()  # incidents attributed to it, oldest first
    quarantined: bool = False  # unschedulable because of its faults, and not by an operator or a policy
    notices: tuple[Notice, ...] = ()  # the newest of each source, withdrawals too
    workers: Sequence[RunningWorker] = field(default=())  # every living worker, as the node reported last
    workers_version: int = 0  # of that report; 0 = the node does not report its workers
    workers_at: float = 0.0  # when that report was folded
    template: TemplateState | None = None  # its worker template, from the same report; None = not reported
    ended: tuple[WorkerEnded, ...] = ()  # how ranks ended that had no order to stop; `ago_s` counts from `workers_at`
    reset_due: ResetDue | None = None
    reset_at: float = 0.0  # when its GPUs were last reset: findings about earlier faults are ignored
    # set if a fault took it out of service: how it returns; None = an operator did, or it is in service
    removal: Removal | None = None
    probation: Probation | None = None  # set after it has returned
    booted_at: float = 0.0  # when its present boot id was first reported
    failed_test_at: float = 0.0  # by its own clock, when it last failed as a suspect: identifies a repeated answer
    failing: bool = False  # it failed the newest pre-flight test that it finished without ranks
    test_failures: tuple[float, ...] = ()  # when such failures began, within the rules' window, oldest first
    links: tuple[LinkTest, ...] = ()  # newest network tests with other nodes, oldest first
    link_begun_at: float = 0.0  # when the newest one began, also if it did not finish
    refused_at: float = 0.0  # when it was last noted that it sends reports about other nodes (binding.py)
    # Since when it has ranks without a break, or had them. Earlier network tests say nothing about its present state.
    ranks_at: float = 0.0
    machine_zone: str = ""  # its machine's failure domain from the cluster's labels; empty = unknown

    @property
    def inventoried(self) -> bool:
        """Whether this incarnation has reported its inventories: all that it announced, or the first."""
        return self.announced is not None and not self.announced

    @property
    def name(self) -> str:
        return self.facts.node

    @property
    def zone(self) -> str:
        """Its failure domain: from its agent's settings, else from the cluster's labels, else the node alone."""
        own = self.facts.zone
        return self.machine_zone if self.machine_zone and own in ("", self.name) else own

    @property
    def unfit(self) -> str:
        """Why its pre-flight test excludes it from getting ranks; empty if the test does not."""
        return self.preflight.failures if self.preflight is not None else ""

    @property
    def untested(self) -> bool:
        """True until its first pre-flight test after joining has finished."""
        return self.preflight is not None and not self.preflight.at

    @property
    def usable(self) -> bool:
        """Whether it may have ranks. A node without a session is usable until both witnesses agree that it is lost."""
        return self.in_service and self.reset_due is None

    @property
    def in_service(self) -> bool:
        """Whether it may have ranks after any GPU reset that is due."""
        return not self.lost and not self.unschedulable_reason

    @property
    def asked_to_end(self) -> bool:
        """Whether its agent was asked to end, and its workers with it. This cannot be withdrawn."""
        return any(each.source == TERMINATION and each.event for each in self.notices)

    @property
    def notice(self) -> Notice | None:
        """Its maintenance notice; of several, the one that starts first."""
        announced = (notice for notice in self.notices if notice.event)
        return min(announced, key=lambda notice: (notice.starts_at or 0.0, notice.source), default=None)


@dataclass(frozen=True, slots=True)
class Breaker:
    """The circuit breaker of the fleet. While it is open, the supervisor observes and records but takes no automatic action."""

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


@dataclass(frozen=True, slots=True)
class Invite:
    """An invitation by which machines become nodes: `invites`. `digest`: SHA-256 of its token. `node`: whom it is for; empty =
    any."""

    id: str
    digest: str
    node: str
    uses: int  # number of nodes that it is for
    made_at: float
    expires_at: float
    by: str  # name of the administrator's token
    used: tuple[tuple[str, float], ...] = ()  # node, time
    revoked_at: float | None = None

    def ended_at(self, at: float) -> float:
        """When it ended; 0 = it has not."""
        if self.revoked_at is not None:
            return self.revoked_at
        if len(self.used) >= self.uses:
            return self.used[-1][1]
        return self.expires_at if at >= self.expires_at else 0.0


@lru_cache(1 << 16)
def heard_in(node: str) -> str:
    """The key of the row of `State.heard` that contains the node."""
    return f"{crc32(node.encode()) % HEARD_GROUPS}"


def last_seq(heard: Mapping[str, Mapping[str, int]], node: Node) -> int:
    """Number of the newest report of this incarnation."""
    return heard.get(heard_in(node.name), {}).get(node.name, 0)


@dataclass(frozen=True)
class State:
    config: Config = field(default_factory=Config)
    born: float = 0.0  # time of the first event: makes ids unique even if all state is lost
    folded_at: float = 0.0  # time of the newest event with an effect; no later leader's clock starts before it
    epoch: int = 0
    led_at: float = 0.0  # when the term began: no agent was connected to this leader before
    secret: str = ""  # of the term: in the ids of its orders
    commands: int = 0  # command ids issued
    incidents_opened: int = 0
    nodes: Mapping[str, Node] = field(default_factory=dict)
    # Newest report of each node's incarnation, by group of nodes (`heard_in`), then by node. Not a field of `Node`: it changes
    # with each report, and most reports change nothing else of the node.
    heard: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    jobs: Mapping[str, Job] = field(default_factory=dict)
    live: Mapping[str, Live] = field(default_factory=dict)  # by job, also one that is not in `jobs`; none without nodes
    incidents: Mapping[str, Incident] = field(default_factory=dict)  # open ones
    closed: tuple[Incident, ...] = ()  # the last ones, oldest first
    unused_numbers: Numbers = field(default_factory=Numbers)  # of forgotten nodes, for the next new ones
    uses: int = 0  # grows when the possible uses of some node may have changed
    outbox: Mapping[str, Send] = field(default_factory=dict)  # orders of single nodes not answered yet, by command id
    broadcasts: Mapping[str, Broadcast] = field(default_factory=dict)  # by job: the broadcast of its newest generation
    # by job: slots that have not answered its broadcast
    unanswered: Mapping[str, Numbers] = field(default_factory=dict)
    timers: Mapping[Timer, float] = field(default_factory=dict)  # → due
    questions: tuple[str, ...] = ()  # incidents whose policy has not answered yet
    breaker: Breaker = field(default_factory=Breaker)
    diagnostics_at: float = 0.0  # when the last message from diagnostics arrived, about any job
    last_fault: tuple[float, str] = (0.0, "")  # (time, node) of the last fault: two at once have a common cause
    invites: tuple[Invite, ...] = ()  # open ones, and those that ended within a week; oldest first
    replaced: tuple[float, ...] = ()  # when replacement machines were requested, within the last day
    index: Index | None = field(default=None, init=False, compare=False, repr=False)  # derived from the tables

    def sends(self) -> Iterator[Send]:
        """All unanswered orders."""
        yield from self.outbox.values()
        for job, slots in self.unanswered.items():
            yield from map(self.broadcasts[job].send, slots)

    def last_seq(self, node: Node) -> int:
        return last_seq(self.heard, node)

    def live_on(self, node: Node) -> dict[str, tuple[int, ...]]:
        """Generations that may have live workers on the node, by job."""
        found = ((job, generations_on(live, node.number)) for job, live in sorted(self.live.items()))
        return {job: generations for job, generations in found if generations}

    def indexed(self, index: Index) -> State:
        """The same state with this index attached."""
        return evolve(self, index=index)
