"""What the REST API answers: the response models of `/v1`. Times are Unix seconds unless a field says otherwise."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from holdfast.domain.faults import (
    FOR_S_DEFAULT,
    FOR_S_MAX,
    LASTING,
    LOSS_PERCENT_DEFAULT,
    LOSS_PERCENT_MAX,
    LOSS_PERCENT_MIN,
    OFFSET_S_DEFAULT,
    OFFSET_S_MAX,
    XID_MAX,
    FaultKind,
)
from holdfast.domain.findings import FindingKind, Remedy, Severity
from holdfast.domain.incidents import ActionKind, IncidentState, RungEnd
from holdfast.domain.nodes import NodeState
from holdfast.domain.tiers import NEARNESS, STORE
from holdfast.supervisor.protocol import JobPhase
from holdfast.wire.jobfile import JobFile

T = TypeVar("T")


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Page(Model, Generic[T]):
    """`next_cursor` goes into the next request's `cursor`; null = that was all."""

    items: list[T]
    next_cursor: str | None = None


# ---------------------------------------------------------------- incidents and actions


class Decision(Model):
    kind: ActionKind
    reason: str
    nodes: list[str] = []
    dp: int | None = None
    within_s: Annotated[float, Field(description="limit of this rung; 0 = none of its own")] = 0.0
    before: Annotated[list[Decision], Field(description="steps of the rung before this action")] = []
    fallbacks: Annotated[list[Decision], Field(description="rungs of the recipe that are left")] = []


class Rung(Model):
    """One rung of a recipe that was tried, or refused."""

    recipe: Annotated[int, Field(description="1 = the first recipe that answered the incident")]
    rung: Annotated[int, Field(description="within its recipe, from 1")]
    action: Annotated[str, Field(description="the actions of the rung in order: cordon then hot_swap")]
    nodes: list[str]
    began_at: float
    ended_at: float | None
    within_s: Annotated[float, Field(description="0 = no limit of its own")]
    end: Annotated[RungEnd | None, Field(description="null = it is being carried out")]
    reason: Annotated[str, Field(description="why the policy wanted it")]
    why: Annotated[str, Field(description="why it ended so")]


class RankLog(Model):
    """A part of the log of one rank."""

    job: str
    rank: int
    node: str
    generation: int
    offset: Annotated[int, Field(description="of the text in the log, in bytes")]
    next_offset: Annotated[int, Field(description="of what follows the text; ask for it to follow the log")]
    size: Annotated[int, Field(description="of the log now, in bytes; the agent drops the oldest part of a large one")]
    text: str


class Incident(Model):
    """One fault, or one planned change, from signal to first new step."""

    id: str
    job: str
    kind: str
    cause: str
    state: IncidentState
    severity: str
    node: str
    rank: int | None
    gpu: int | None
    generation: Annotated[int, Field(description="the one that it struck")]
    new_generation: int | None
    action: Decision | None
    decided_by: str
    t_fault: float
    t_detected: float
    t_decided: float | None
    t_prepared: float | None
    t_first_step: float | None
    restored_step: int | None
    last_step: Annotated[int | None, Field(description="newest step finished before the fault")]
    rework_steps: int
    phases_s: Annotated[
        dict[str, float],
        Field(
            description="slowest node or rank: gpu_reset and the self_test after it come before prepare; stop, fork, stage "
            "overlap inside prepare; the others follow START"
        ),
    ]
    restored_from: Annotated[
        dict[str, int], Field(description="shards by where they were: memory, disk, peer, object store")
    ]
    outcome: str
    trace_id: str
    findings: list[str]
    evidence: dict[str, str]
    walk: Annotated[list[Rung], Field(description="rungs of recipes in the order in which they were tried or refused")]
    confidence: Annotated[float, Field(description="0 … 1: how sure the finding is, and what it costs")] = 1.0
    cost_share: Annotated[
        float | None,
        Field(description="share of the job's rate that is lost while the condition lasts; null = not known"),
    ] = None


class Span(Model):
    """A part of an incident that took time, as OpenTelemetry has it."""

    name: str
    service: str
    span_id: str
    parent_id: Annotated[str, Field(description="empty for the first; a parent that is not listed is not on record")]
    start: float
    end: float
    attributes: dict[str, str | int | float | bool]
    error: Annotated[str, Field(description="why it failed; empty when it did not")]


class Trace(Model):
    """An incident from signal to first step, from the supervisor's record. A collector has the same ids, and more detail."""

    incident: str
    trace_id: str
    spans: Annotated[list[Span], Field(description="parents before their children")]


class Action(Model):
    """What was done about an incident. An incident that was decided again has several."""

    id: str
    incident: str
    job: str
    kind: ActionKind
    reason: str
    decided_by: str
    at: float
    nodes: list[str]
    dp: int | None
    generation: int
    new_generation: int | None


# ---------------------------------------------------------------- findings


class Finding(Model):
    """What a detector concluded, on which evidence, by which rule, and what became of it."""

    id: Annotated[str, Field(description="the same physical fault found again carries the same id")]
    kind: FindingKind
    severity: Severity
    summary: str
    node: str
    job: str
    generation: int
    rank: int | None
    gpu: int | None
    at: Annotated[float, Field(description="when it was concluded")]
    since: Annotated[float, Field(description="when the fault began, as far as is known")]
    confidence: float
    rule: Annotated[str, Field(description="the rule that fired")]
    source: Annotated[str, Field(description="where the rule comes from")]
    advice: Annotated[str, Field(description="what a person can do about it")]
    evidence: dict[str, str]
    ladder: Annotated[list[Remedy], Field(description="recommended, mildest first")]
    ttl_s: Annotated[float, Field(description="when it is older, nobody acts on it")]
    judged_at: float
    verdict: Annotated[str, Field(description="what the supervisor did with it")]
    incident: Annotated[str, Field(description="that it opened or is a part of; empty = none")]


# ---------------------------------------------------------------- jobs


class Rank(Model):
    rank: int
    node: str
    state: Annotated[str, Field(description="of its node; 'unknown' when the supervisor has never heard of it")]
    pid: Annotated[int | None, Field(description="on the node; null while its agent reports no process for the rank")]
    since: Annotated[float | None, Field(description="when the process was started, Unix seconds by the node's clock")]


class JobSummary(Model):
    name: str
    phase: Annotated[
        JobPhase | Literal["unknown"],
        Field(
            description="'unknown': it ran when agents last said so, and not all of them have said so within seconds"
        ),
    ]
    reason: str
    unknown_since: Annotated[float | None, Field(description="Unix seconds; null unless the phase is 'unknown'")]
    mesh: Annotated[dict[str, int], Field(description="of the newest generation, outermost dimension first")]
    target_dp: int
    min_dp: int
    max_dp: int
    generation: Annotated[int, Field(description="0 = none yet")]
    nodes: list[str]
    step: Annotated[
        int | None,
        Field(
            description="newest step finished by every rank; null = the script reports no steps: optimizer "
            "steps are observed in it, or it has been silent for a minute"
        ),
    ]
    observed_steps: Annotated[
        int | None,
        Field(
            description="of a script that reports no steps: optimizer steps that were observed in every rank since its start"
        ),
    ]
    observed_step_s: Annotated[float | None, Field(description="seconds for one of these, recently")]
    checkpoint_step: Annotated[int, Field(description="newest step saved by every rank of the running generation")]
    loss: float | None
    tokens_per_s: Annotated[float | None, Field(description="over the last steps; null when the job does not run")]
    submitted_at: float
    priority: Annotated[int, Field(description="of several jobs that want nodes the one with the higher one gets them")]
    permanent_failure: Annotated[
        bool, Field(description="failed by an error of its script: another attempt would fail in the same way")
    ]
    leaving: Annotated[bool, Field(description="completed, and its last checkpoint is on its way to the object store")]
    incident: Annotated[Incident | None, Field(description="the open one; the oldest of several")]


class Interval(Model):
    """How often the job saves, and why so often."""

    steps: int
    auto: Annotated[bool, Field(description="chosen by the supervisor, and chosen again while the job runs")]
    store_s: Annotated[float, Field(description="at most one step per so many seconds goes to the object store")]
    reason: str


class Checkpoint(Model):
    """One saved step, as far as connected nodes and the object store tell."""

    attempt: Annotated[int, Field(description="its lineage: every return to a saved step begins a new one")]
    step: int
    mesh: Annotated[dict[str, int], Field(description="of the generation that saved it, outermost dimension first")]
    tiers: Annotated[
        dict[str, int | bool],
        Field(
            description=f"{', '.join(NEARNESS)}: the number of ranks whose shard some node holds there; "
            f"{STORE}: whether the object store has all of them"
        ),
    ]
    complete: Annotated[bool, Field(description="every rank's shard is in reach")]
    newest: Annotated[bool, Field(description="the newest complete one of the run: a restart would begin here")]
    needed: Annotated[bool, Field(description="the job is not over and may go back to it: it cannot be deleted")]


class CheckpointHolders(Model):
    """Who has the shards of one saved step."""

    attempt: int
    step: int
    ranks: Annotated[dict[int, list[str]], Field(description="rank → connected nodes that hold its shard")]


class Kept(Model):
    """The newest complete step that the nodes of a job that is over still have."""

    attempt: int
    step: int
    on_disk: Annotated[bool, Field(description="every rank's shard is on some node's disk")]
    directories: Annotated[dict[str, str], Field(description="node → the directory of the job's files on its disk")]


class AttachBody(Model):
    token: Annotated[str, Field(min_length=1, max_length=200, description="of the launcher that submitted the job")]


class Suspended(Model):
    """Where a suspended job goes on when there are nodes for it, and where that checkpoint is."""

    since: float
    step: Annotated[int, Field(description="the newest complete one; 0 = none: it starts again from step 0")]
    attempt: int
    tiers: Annotated[
        dict[str, int | bool], Field(description="as those of a checkpoint, with what nodes had that have gone since")
    ]
    durable: Annotated[bool, Field(description="all of it is on disks, and in the object store if the job has one")]
    directories: Annotated[dict[str, str], Field(description="node → the directory of the job's files on its disk")]
    nodes_left: Annotated[list[str], Field(description="nodes of the job that are connected; their copies go on")]


class ShardSources(Model):
    """Where the shards of one saved step can be fetched, and with which secret: whoever has it can read the job's shards."""

    attempt: int
    step: int
    mesh: Annotated[dict[str, int], Field(description="of the generation that saved it, outermost dimension first")]
    token: str
    ranks: Annotated[
        dict[int, dict[str, str]], Field(description="rank → node → host:port of its replicator's data plane")
    ]


class Job(JobSummary):
    goes_on_from: Annotated[int | None, Field(description="the step that it was submitted to go on from; null = none")]
    kept: Annotated[Kept | None, Field(description="null while the job is not over, and when nothing is left")]
    suspended: Annotated[Suspended | None, Field(description="null in any other phase")]
    interval: Annotated[Interval | None, Field(description="null before the first start")]
    reserved: Annotated[list[str], Field(description="free nodes that are reserved as its spares now")]
    ranks: list[Rank]
    spec: JobFile


class EarlierPolicy(Model):
    name: str
    sha256: str
    since: float


class Policy(Model):
    """What decides about a job's incidents. The default policy has no name; a plug-in has no text."""

    name: Annotated[
        str, Field(description="path of the script as it was submitted, or plugin:NAME; empty = the default policy")
    ]
    sha256: Annotated[str, Field(description="of the text; empty without one")]
    params: dict[str, str | int | float | bool]
    source: str
    since: Annotated[float | None, Field(description="Unix seconds; null = longer than the history reaches back")]
    before: Annotated[list[EarlierPolicy], Field(description="of the newest run, oldest first")]


class PolicyQuestion(Model):
    """One question to a policy and its answer, in the format that `holdfast policy test` reads."""

    at: float
    incident: Annotated[dict[str, Any], Field(description="as the policy saw it")]
    job: Annotated[dict[str, Any], Field(description="as the policy saw it")]
    action: dict[str, Any]
    decided_by: str


class AlertAddress(Model):
    address: Annotated[str, Field(description="its number and its scheme, and of a webhook the host")]
    sent: bool
    problem: str


class AlertsTested(Model):
    addresses: Annotated[
        list[AlertAddress], Field(description="in the order of the settings; empty = none is configured")
    ]


class Goodput(Model):
    """Every second of wall time in exactly one class: `useful_s`, `unmeasured_s` and the values of `badput_s` are `wall_s`."""

    job: str
    started_at: float
    wall_s: float
    useful_s: float
    unmeasured_s: Annotated[float, Field(description="all ranks ran, and their script reports no steps")]
    badput_s: dict[str, float]
    goodput_job: Annotated[
        float | None, Field(description="useful ÷ wall; null = not known: the script reports no steps")
    ]
    goodput_paid: Annotated[
        float | None, Field(description="useful ÷ paid node time, spares included; null = not known")
    ]
    fault_free_tokens_per_s: float
    fault_free_flops_per_s: Annotated[float, Field(description="as the script reports them; 0 = it does not")] = 0.0
    tokens: int
    rework_steps: int
    world_sizes: Annotated[list[tuple[float, int]], Field(description="(seconds since submission, ranks from then on)")]
    tokens_per_s: Annotated[list[tuple[float, float]], Field(description="(seconds since submission, rate)")]


# ---------------------------------------------------------------- nodes


class Check(Model):
    """One thing that a node tested on itself."""

    name: str
    ok: Annotated[bool | None, Field(description="null = it could not be tested: that says nothing of the node")]
    detail: str


class Preflight(Model):
    """A node's newest tests of itself."""

    at: Annotated[float, Field(description="0 = they are under way")]
    passed: bool
    took_s: float
    checks: list[Check]


class Notice(Model):
    """Somebody says that the node's machine will be taken."""

    source: str
    event: str
    starts_at: Annotated[float | None, Field(description="Unix seconds; null: it may be any moment")]


class Node(Model):
    node: str
    state: NodeState
    connected: bool
    job: str
    reason: Annotated[
        str,
        Field(
            description="why it is cordoned or lost, or will be, and what brings it back; that it is on probation; empty when "
            "there is nothing to say"
        ),
    ]
    zone: str
    capacity: int
    hostname: str
    address: str
    replicator_endpoint: str
    incarnation: str
    agent_pid: int
    directory: str
    kernel_log: str
    disk_dir: Annotated[
        str, Field(description="where shards are kept, each job in a directory of its name; empty = unknown")
    ]
    version: str
    inventoried: Annotated[bool, Field(description="its agent has reported which checkpoints are kept there")]
    quarantined: Annotated[bool, Field(description="cordoned because it keeps failing")]
    faults_per_day: Annotated[float, Field(description="to be expected, by its own past; spares are chosen by it")]
    preflight: Annotated[Preflight | None, Field(description="null: this node does not test itself")] = None
    boot_id: Annotated[str, Field(description="of its machine, another one after each boot; empty = unknown")] = ""
    hold_until: Annotated[
        float | None, Field(description="end of its hold-down after a fault, Unix seconds; null: it is not held down")
    ] = None
    probation_until: Annotated[
        float | None, Field(description="end of its probation, Unix seconds; null: it is not on probation")
    ] = None
    returns_by: Annotated[
        Literal["", "itself", "operator"],
        Field(description="what brings a node back that a fault or its own tests took out of service; empty: none did"),
    ] = ""
    notices: Annotated[list[Notice], Field(description="of maintenance that is ahead or under way")] = []
    pool: Annotated[str, Field(description="only jobs of this pool get the node; empty = jobs without one")] = ""


class Fault(Model):
    """An incident that counts against a node."""

    at: float
    incident: str
    job: str
    weight: Annotated[float, Field(description="1 = the node's fault; less = perhaps the script's")]
    shared: Annotated[bool, Field(description="other nodes failed at the same time: it does not count")]


class LinkTest(Model):
    """A test of the network with another node, while neither had ranks."""

    at: float
    partner: str
    out_bytes_per_s: Annotated[float, Field(description="to the partner; 0 with a failure")]
    in_bytes_per_s: Annotated[float, Field(description="from the partner; 0 with a failure")]
    round_trip_s: float
    failure: Annotated[
        str, Field(description="the partner was not reached, or data was damaged; empty: it was measured")
    ]
    verdict: Annotated[
        Literal["good", "slow", "failed", "unjudged"],
        Field(description="unjudged: there were too few tests of other nodes to compare it with"),
    ]
    expected_bytes_per_s: Annotated[
        float | None,
        Field(description="median of similar tests of other nodes, in the slower direction; null: unknown"),
    ]
    expected_round_trip_s: float | None


class NodeDetail(Node):
    """One node with its past."""

    faults_weigh: Annotated[float, Field(description="its faults, each worth less the older it is")]
    quarantine_limit: Annotated[float, Field(description="what they may weigh before the node is quarantined")]
    faults: Annotated[list[Fault], Field(description="what counts against it since its last repair, oldest first")]
    incidents: Annotated[list[Incident], Field(description="the latest ones that began here, newest first")]
    links: Annotated[
        list[LinkTest], Field(description="the latest tests of the network with other idle nodes, oldest first")
    ] = []


# ---------------------------------------------------------------- operations, version, problems


class Operation(Model):
    """An accepted request. 202 says that it is on its way to the leader; `state` what became of it."""

    id: str
    url: str
    state: Literal["pending", "succeeded", "failed"]
    reason: str = ""


class Breaker(Model):
    """One for the fleet. Open: the supervisor watches, records and does not act on faults; healthy runs go on."""

    state: Literal["open", "closed"]
    reason: str = ""
    open_until: Annotated[float | None, Field(description="Unix seconds; it closes by itself then")] = None
    failed_nodes: Annotated[list[str], Field(description="nodes that were lost or failed within the window")]
    changes: Annotated[int, Field(description="generation changes within the window")]


class WatchedObjects(Model):
    """How well the leader sees one collection of objects of its cluster."""

    what: Annotated[str, Field(description="such as nodes, or pods of namespace ml")]
    problem: Annotated[
        str, Field(description="why it is not seen now: a right, the token, the API server; empty = it is")
    ]
    problem_since: Annotated[float | None, Field(description="Unix seconds; null: no problem")]
    confirmed_at: Annotated[
        float | None, Field(description="Unix seconds, when the API server last answered; null: never in this term")
    ]


class Kubernetes(Model):
    """The bridge to the cluster of the machines (docs/kubernetes.md). While there is a problem no notice is given or withdrawn,
    and notices end an hour after they were last confirmed."""

    watch: Annotated[bool, Field(description="HOLDFAST_KUBERNETES_WATCH of the supervisor that answers")]
    watched: Annotated[
        list[WatchedObjects], Field(description="empty: nothing is watched, or this supervisor does not lead")
    ]


class Version(Model):
    version: str
    protocol_version: int
    supervisor: str
    leader: Annotated[bool, Field(description="whether this supervisor leads")]
    leader_api: Annotated[str, Field(description="where the leader's API answers; empty = unknown")]
    epoch: int
    event_log: Annotated[
        str, Field(description="this lifetime of the event log's server: another after each start; empty = it is away")
    ] = ""


class Health(Model):
    status: Literal["ok"]
    leader: bool


class FieldProblem(Model):
    """One mistake in a request."""

    field: str
    value: Any = None
    expected: str
    detail: str


class Problem(Model):
    """RFC 9457. Every error of this API has this body, as application/problem+json."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[FieldProblem] = []
    leader: Annotated[str | None, Field(description="on 503: where the leader's API answers")] = None


# ---------------------------------------------------------------- request bodies

Text = Annotated[str, Field(min_length=1, max_length=1000)]


class StopBody(Model):
    reason: Text = "stopped by an operator"
    save: Annotated[bool, Field(description="take a last checkpoint first, when the job can")] = True


class PolicyBody(Model):
    policy: Annotated[
        str | dict[str, Any],
        Field(description="as in a job file: plugin:NAME, or {file, params, source}; empty = the default policy"),
    ] = ""


class SavedStep(Model):
    attempt: Annotated[int, Field(ge=1, strict=True)]
    step: Annotated[int, Field(ge=1, strict=True)]


class FaultBody(Model):
    kind: FaultKind
    rank: Annotated[
        int, Field(ge=0, description="the rank, or any rank of the node; ignored for redis_kill and leader_kill")
    ]
    for_s: Annotated[
        float, Field(gt=0, le=FOR_S_MAX, description="what lasts ends after it: " + ", ".join(sorted(LASTING)))
    ] = FOR_S_DEFAULT
    xid: Annotated[int, Field(ge=0, le=XID_MAX, description="of kind xid")] = 0
    loss_percent: Annotated[
        float, Field(ge=LOSS_PERCENT_MIN, le=LOSS_PERCENT_MAX, description="of kind lossy_link, in each direction")
    ] = LOSS_PERCENT_DEFAULT
    offset_s: Annotated[
        float,
        Field(ge=-OFFSET_S_MAX, le=OFFSET_S_MAX, allow_inf_nan=False, description="of kind clock_jump; not 0"),
    ] = OFFSET_S_DEFAULT


class PruneBody(Model):
    steps: Annotated[list[SavedStep], Field(min_length=1, max_length=10_000)]


class ResumeBody(Model):
    step: Annotated[int | None, Field(ge=1, strict=True, description="null: the newest complete one")] = None


class ResizeBody(Model):
    dp: Annotated[int, Field(ge=1, strict=True, description="replicas to run with, within the job's range")]
    reason: Text = "resized by an operator"


class ReasonBody(Model):
    reason: Text = "asked for by an operator"


class NoticeBody(Model):
    """`starts_at` or `in_s`, or neither if it may be any moment."""

    event: Annotated[Text, Field(min_length=1, description="what will happen, in a few words")] = "maintenance"
    starts_at: Annotated[float | None, Field(gt=0, description="Unix seconds")] = None
    in_s: Annotated[
        float | None, Field(ge=0, le=366 * 86_400, description="seconds from now, whatever your clock says")
    ] = None

    @model_validator(mode="after")
    def _one_time(self) -> Self:
        if self.starts_at is not None and self.in_s is not None:
            raise ValueError("give starts_at or in_s, not both")
        return self


class CheckpointBody(Model):
    grace_s: Annotated[
        float | None,
        Field(
            gt=0, le=86_400, description="answer after this long, however far it came; absent = as long as copies take"
        ),
    ] = None


class EmptyBody(Model):
    """Nothing to say; an empty object or no body at all."""
