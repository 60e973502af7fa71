"""The control protocol between supervisor and agent, as values: the supervisor sends orders, agents send reports.

An order has a `command_id`, which is never reused, and is sent under the leader's `epoch`. An agent executes each id once and
stores the answer, also across its own restart. It answers a repeated order with the stored answer, and refuses an epoch lower
than the highest one that it has received. Reports are numbered per incarnation and sent again until they are acknowledged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import Placement, RankRestore, ShardPlace, ShardRecord, ShardSource, StoredStep
from holdfast.domain.job import CheckpointSpec, ChecksSpec, HangSpec, LaunchSpec
from holdfast.domain.links import LinkLimits, LinkMeasured
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import NodeFacts, Preflight, RunningWorker, TemplateState, WorkerEnded

# ---------------------------------------------------------------- supervisor → agent


@dataclass(frozen=True, slots=True)
class PrepareTemplate:
    """Prepare a worker template that has imported the job's modules. Sent to spares, so that a hot swap does not wait for
    imports."""

    job: str
    launch: LaunchSpec


@dataclass(frozen=True)  # no slots, for `evolve`: each of 12,500 nodes gets a copy with its own placement
class Prepare:
    """Stop all workers of older generations, fork the workers of this generation, and stage their shards. The agent answers
    when all of this is done.

    Forked workers wait: they run no code of the user's script before `Start`.
    """

    job: str
    generation: int
    attempt: int
    mesh: Mesh
    placement: Placement
    nnodes: int
    launch: LaunchSpec
    checkpoint: CheckpointSpec
    hang: HangSpec
    token: str  # the job's secret for the shard data plane
    restore_step: int  # 0 = from scratch
    restore_mesh: Mesh | None = None  # of the generation that saved the checkpoint; None if `restore_step` is 0
    restore: tuple[RankRestore, ...] = ()  # for this node's ranks; empty if `restore_step` is 0
    peers: tuple[ShardSource, ...] = ()  # replicators that get a copy of every shard committed on this node
    traceparent: str = ""
    checks: ChecksSpec = field(default_factory=ChecksSpec)
    self_test: bool = False  # the job's state is corrupt: `Prepare` fails on a node whose devices compute wrong results
    first_attempt: int = 0  # of this submission: checkpoints of older attempts belong to earlier runs; 0 = not known
    chaos: bool = False  # the job allows injected faults; otherwise the agent refuses them
    # This node is a suspect: its quick tests may take this many seconds, during the preparation. 0 = the node is not tested.
    suspect_test_s: float = 0.0
    warning_settles_s: float = 0.0  # how long a warning must last before the policy is asked; 0 = not known
    # The script has reported steps in an earlier generation: its ranks count as stepping without a message only after this
    # time, instead of the agent's `assume_started_after_s`. 0 = nothing is known of the script.
    first_message_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Start:
    """Start the prepared workers. `master` is the rendezvous endpoint from the answer of rank 0's node to `Prepare`."""

    job: str
    generation: int
    master: str  # host:port
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop this job's workers of `generation` and older ones; with `grace_s`, workers may save first. `ended`: the job has
    ended; its files are retained, and its memory is freed when they are on disk. `forget`: delete the job's files."""

    job: str
    generation: int
    grace_s: float = 0.0
    forget: bool = False
    ended: bool = False


class SaveStage(StrEnum):
    """The stages of an agreement on a save: either every rank acts at its step, or none does."""

    ORDER = ""  # no agreement: each rank that the order reaches in time saves
    PROPOSED = "proposed"  # answered when every rank of the node has promised to wait at the step for the result
    AGREED = "agreed"  # every rank of the generation has promised, so all save
    VOID = "void"  # a rank cannot: nobody saves


@dataclass(frozen=True, slots=True)
class CheckpointNow:
    """Save after step `at_step` on every rank; a rank that is already past it reports a miss.

    `to_object_store`: the checkpoint is also uploaded to the job's object store, regardless of its interval. This includes a
    step that workers saved before they ended successfully. `leaving`: the reason for which this generation is to end, by a
    planned change or a stop, when the checkpoint is complete; empty = the generation continues. The script's `on_leaving` is
    called before the save. `stage`: a `SaveStage`; only for agents whose `NodeFacts.agrees_on_saves` is set.
    """

    job: str
    generation: int
    at_step: int
    to_object_store: bool = False
    leaving: str = ""
    stage: str = SaveStage.ORDER.value


@dataclass(frozen=True, slots=True)
class SetInterval:
    """Save at every multiple of `interval_steps` from step `from_step` on. The ranks wait at the step before it for the result
    of a proposed save, so that all of them change the interval at the same step."""

    job: str
    generation: int
    from_step: int
    interval_steps: int


@dataclass(frozen=True, slots=True)
class Prune:
    """Delete these checkpoints, (attempt, step), of a job, on request. Refused for checkpoints that a running job needs."""

    job: str
    steps: tuple[CheckpointId, ...]


@dataclass(frozen=True, slots=True)
class ResetGpu:
    """Reset these GPUs of a node without workers, and test the node. Carried out at most once, even if the agent ends.

    Refused while a process has one of the devices open. Only for agents whose `NodeFacts.resets_gpus` is set.
    """

    job: str  # the job that had ranks on the node when the reset was decided; empty = none
    gpus: tuple[int, ...] = ()  # NVML indices, in the order of PCI addresses; empty = all GPUs of the node
    timeout_s: float = 0.0  # for the reset command
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class RebootNode:
    """Boot the machine of a node without workers. Carried out at most once, even if the agent ends.

    The answer states whether the command succeeded, not whether the machine boots; a boot is recognised by a new boot id. Only
    for agents whose `NodeFacts.reboots` is set.
    """

    cause: str  # the fault that a boot is expected to clear
    timeout_s: float = 0.0  # for the command
    job: str = ""  # always empty: a reboot belongs to no job


@dataclass(frozen=True, slots=True)
class RestartAgent:
    """Replace the agent of a node without workers by a new one, with the same settings, in the same process.

    The answer announces the restart; a completed restart is recognised by a new incarnation. Only for agents whose
    `NodeFacts.restarts` is set.
    """

    cause: str
    job: str = ""  # always empty: the restart belongs to no job


@dataclass(frozen=True, slots=True)
class CheckLink:
    """Test the network with another node without ranks. The answer of the node that measures contains the result.

    Refused, or aborted at once, if the node has or prepares workers. Only for agents whose `NodeFacts.tests_links` is set.
    """

    partner: str  # name of the other node
    token: str  # the secret of this test
    limits: LinkLimits
    endpoint: str = ""  # of the partner's replicator, which waits for this node; empty = wait for the partner
    for_s: float = 0.0  # how long to wait for the partner
    job: str = ""  # always empty: the test belongs to no job


@dataclass(frozen=True, slots=True)
class Inject:
    """Cause a fault (`domain.faults`) on this node, in a generation that was prepared with `chaos`, to test the recovery.

    Refused after `not_after` (Unix s), so that a late order causes no fault."""

    job: str
    generation: int
    kind: str  # a `FaultKind`
    rank: int  # a rank of this node; for a fault of the node, any of its ranks
    for_s: float  # duration of a fault that lasts
    xid: int  # for kind xid
    not_after: float
    operation: str  # id of the API operation that waits for the answer
    loss_percent: float = 0.0  # for kind lossy_link
    offset_s: float = 0.0  # for kind clock_jump


Order = (
    PrepareTemplate
    | Prepare
    | Start
    | Stop
    | CheckpointNow
    | SetInterval
    | Prune
    | ResetGpu
    | RebootNode
    | RestartAgent
    | CheckLink
    | Inject
)


# ---------------------------------------------------------------- agent → supervisor


@dataclass(frozen=True, slots=True)
class Announced:
    """The jobs whose inventories a session sends after its Hello: those that the node's replicator holds anything of."""

    jobs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Hello:
    """The first report on every control session."""

    facts: NodeFacts
    running: Sequence[RunningWorker] = field(default=())
    preflight: Preflight | None = None  # the newest pre-flight test; None = this node does not test itself
    workers_version: int = 0  # of `running`, as in `WorkersChanged`; 0 = this agent does not report changes
    ended: tuple[WorkerEnded, ...] = ()  # of generations that have workers on this node, and of the last one that had
    template: TemplateState | None = None  # None = this agent does not report it
    announced: Announced | None = None  # None = this agent does not tell, or its replicator has not told it yet


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """All worker processes that this node has, whatever was ordered. Replaces the previous report.

    Sent when the set has changed, unless the answer to `Prepare` contains the change. Every heartbeat contains the newest
    version, so that the supervisor notices a lost report and requests the set again. Comparing versions costs nothing while the
    set does not change.
    """

    version: int  # grows with every change, per incarnation
    workers: Sequence[RunningWorker] = field(default=())
    ended: tuple[WorkerEnded, ...] = ()  # as in `Hello`
    template: TemplateState | None = None  # as in `Hello`; a change of the template is a change of the set


@dataclass(frozen=True, slots=True)
class OrderDone:
    """The answer to one order. `master` is set by the node of rank 0 in answer to `Prepare`."""

    command_id: str
    ok: bool
    reason: str = ""
    master: str = ""
    at: float = 0.0
    # for Prepare: ("stop", s), ("fork", s), ("stage", s), ("self_test", s)
    phases_s: tuple[tuple[str, float], ...] = ()
    workers: Sequence[RunningWorker] = field(default=())  # for Prepare: the forked processes
    # For Prepare: number of shards from "memory", "disk", "peer", "object store".
    restored_from: tuple[tuple[str, int], ...] = ()
    unrestorable: bool = False  # for Prepare: no source returns the shards to restore; the node itself may be healthy
    restored_bytes: tuple[tuple[str, int], ...] = ()  # for Prepare: number of bytes from each source
    # For Prepare: the version as in `WorkersChanged`, if `workers` is the complete set; 0 = a `WorkersChanged` follows.
    workers_version: int = 0
    # for Prepare: the results of the quick tests of a suspect; None = the node was not tested
    tested: Preflight | None = None
    link: LinkMeasured | None = None  # for CheckLink, from the node that measures; None = the test did not finish


@dataclass(frozen=True, slots=True)
class RanksStepping:
    """These ranks have finished their first step of this generation. `at`: when the last of them finished it, Unix seconds.

    Heartbeats report it, until `FirstStepsRecorded`. Agents of earlier versions send it as a report."""

    job: str
    generation: int
    ranks: tuple[int, ...]
    step: int
    at: float
    # of the slowest rank: ("process_group", s), ("restore", s), ("first_step", s)
    phases_s: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RanksFinished:
    """These ranks have ended with exit code 0."""

    job: str
    generation: int
    ranks: tuple[int, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Inventory:
    """All intact and verified shards of `job` that this node's replicator holds. Replaces the previous inventory.

    `stored`: the newest checkpoints that are known to be complete in the object store, newest first. With a `base` the report
    is a difference (`domain.inventories`): `shards` are new or changed, and the shards at `gone` no longer exist.
    """

    job: str
    shards: Sequence[ShardRecord] = field(default=())
    stored: tuple[StoredStep, ...] = field(default=())
    base: int = 0  # number of the report that the difference applies to, the last one of the session; 0 = complete
    gone: Sequence[ShardPlace] = field(default=())


@dataclass(frozen=True, slots=True)
class Tested:
    """A node without ranks has run its pre-flight test."""

    preflight: Preflight


@dataclass(frozen=True, slots=True)
class StepReached:
    """The newest step that every rank of a node has finished. Sent with heartbeats; neither numbered nor acknowledged.

    If the script reports no steps, `step` is the step that it was started from, and `observed` is the number of optimizer steps
    that were observed in each rank since then (`train.observed_steps`)."""

    job: str
    generation: int
    step: int
    observed: int = 0  # 0 = none
    observed_step_s: float = 0.0  # recent duration of an observed step, in seconds


@dataclass(frozen=True, slots=True)
class RanksStarted:
    """The ranks of a generation were started on this node. In heartbeats, until their first steps are reported; answers the
    `Start` order."""

    job: str
    generation: int


@dataclass(frozen=True, slots=True)
class FirstStepsRecorded:
    """The first steps of a generation, which a node's heartbeats report, are recorded, or nothing depends on them any more."""

    job: str
    generation: int


Report = Hello | WorkersChanged | OrderDone | RanksStepping | RanksFinished | Inventory | Tested
