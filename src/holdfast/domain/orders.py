"""The control protocol between supervisor and agent, as values: orders go down, reports come up.

An order has a `command_id` that is unique for ever and is sent under the leader's `epoch`. An agent executes an id once,
remembers the answer (also across its own restart), answers a repeat from memory, and refuses an epoch lower than the
highest it has seen. Reports are numbered per incarnation and sent again until acknowledged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import Placement, RankRestore, ShardPlace, ShardRecord, ShardSource, StoredStep
from holdfast.domain.job import CheckpointSpec, ChecksSpec, HangSpec, LaunchSpec
from holdfast.domain.links import LinkLimits, LinkMeasured
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import NodeFacts, Preflight, RunningWorker, TemplateState, WorkerEnded

# ---------------------------------------------------------------- supervisor → agent


@dataclass(frozen=True, slots=True)
class Warm:
    """Have a template ready that has imported these modules: sent to spares, so that a swap does not pay for imports."""

    job: str
    launch: LaunchSpec


@dataclass(frozen=True)  # no slots: of 12,500 nodes each gets a copy with its own placement
class Prepare:
    """Stop every worker of an older generation, fork this one's, stage their shards. Answer when all of it is done.

    Forked workers wait: nothing of the user's script runs before `Start`.
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
    restore_mesh: Mesh | None = None  # of the generation that saved it; None when restore_step is 0
    restore: tuple[RankRestore, ...] = ()  # for this node's ranks; empty when restore_step is 0
    peers: tuple[ShardSource, ...] = ()  # replicators that get a copy of every shard committed here
    traceparent: str = ""
    checks: ChecksSpec = field(default_factory=ChecksSpec)
    self_test: bool = False  # the state went wrong without an error: a node whose devices compute wrongly answers so
    first_attempt: int = 0  # of this submission: what older attempts saved belongs to earlier ones; 0 = not told
    chaos: bool = False  # the job allows injected faults; an agent refuses them otherwise
    # This node is suspected: its quick tests have so many seconds, beside the preparation. 0 = it is not tested
    suspect_test_s: float = 0.0
    warning_settles_s: float = 0.0  # how long a warning must last to lead to anything; 0 = not told


@dataclass(frozen=True, slots=True)
class Start:
    """Let the prepared workers run. `master` is the rendezvous endpoint that rank 0's node answered to `Prepare`."""

    job: str
    generation: int
    master: str  # host:port
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop this job's workers of `generation` and older; `grace_s` lets them save first. `ended`: the job is over; its files
    stay, and its memory is given back once they are on disk. `forget` drops the job's files: somebody asked for it."""

    job: str
    generation: int
    grace_s: float = 0.0
    forget: bool = False
    ended: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointNow:
    """Save after step `at_step` on every rank; a rank that is already past it reports a miss.

    `to_object_store`: the checkpoint is also uploaded to the job's object store, regardless of its interval. This includes a
    step that workers saved before they ended successfully. `leaving`: this generation is to end by a planned change or a stop
    once the checkpoint is complete, and why; empty = it goes on. The script's `on_leaving` is called before the save.
    """

    job: str
    generation: int
    at_step: int
    to_object_store: bool = False
    leaving: str = ""


@dataclass(frozen=True, slots=True)
class SetInterval:
    """Save at every multiple of `interval_steps` from step `from_step` on: a step that no rank has reached yet, so that all
    ranks change over at the same one."""

    job: str
    generation: int
    from_step: int
    interval_steps: int


@dataclass(frozen=True, slots=True)
class Prune:
    """Delete these saved steps, (attempt, step), of a job: somebody asked for it. What a running job needs is refused."""

    job: str
    steps: tuple[CheckpointId, ...]


@dataclass(frozen=True, slots=True)
class ResetGpu:
    """Reset these GPUs of a node without workers, and test the node. Carried out at most once, even if the agent ends.

    Refused while a process has one of the devices open. Only for agents whose `NodeFacts.resets_gpus` is set.
    """

    job: str  # that had ranks there when the reset was demanded; empty = none
    gpus: tuple[int, ...] = ()  # indices in the order of PCI addresses, as NVML counts; empty = all of the node
    timeout_s: float = 0.0  # for the command that resets
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class RebootNode:
    """Boot the machine of a node without workers. Carried out at most once, even if the agent ends.

    The answer says whether the command ended well, not whether the machine boots: that is another boot id. Only for agents
    whose `NodeFacts.reboots` is set.
    """

    cause: str  # the fault that a boot ends
    timeout_s: float = 0.0  # for the command
    job: str = ""  # always empty: a reboot is the node's own matter


@dataclass(frozen=True, slots=True)
class RestartAgent:
    """Replace the agent of a node without workers by a new one, with the same settings, in the same process.

    The answer says that it will; that it has is another incarnation. Only for agents whose `NodeFacts.restarts` is set.
    """

    cause: str
    job: str = ""  # always empty: it is the node's own matter


@dataclass(frozen=True, slots=True)
class CheckLink:
    """Test the network with another node that has no ranks either. The answer of the one that measures says what it found.

    Refused, and dropped at once, when the node has or prepares workers. Only for agents whose `NodeFacts.tests_links` is set.
    """

    partner: str
    token: str  # the secret of this test
    limits: LinkLimits
    endpoint: str = ""  # of the partner's replicator, which waits for this node; empty = wait for the partner
    for_s: float = 0.0  # how long to wait for it
    job: str = ""  # always empty: it is the node's own matter


@dataclass(frozen=True, slots=True)
class Inject:
    """Cause a fault (`domain.faults`) on this node, in a generation that was prepared with `chaos`, to test the recovery.

    Refused after `not_after` (Unix s), so that an order that was late breaks nothing."""

    job: str
    generation: int
    kind: str  # a `FaultKind`
    rank: int  # of this node; of a fault of the node: any of its ranks
    for_s: float  # what lasts ends after it
    xid: int  # of kind xid
    not_after: float
    operation: str  # that is answered
    loss_percent: float = 0.0  # of kind lossy_link
    offset_s: float = 0.0  # of kind clock_jump


Order = (
    Warm
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
class Hello:
    """First on every session."""

    facts: NodeFacts
    running: Sequence[RunningWorker] = field(default=())
    preflight: Preflight | None = None  # the newest; None = this node does not test itself
    workers_version: int = 0  # of `running`, as in `WorkersChanged`; 0 = this agent does not report changes
    ended: tuple[WorkerEnded, ...] = ()  # of the generations that still have workers here, and of the last one that had
    template: TemplateState | None = None  # None = this agent does not say


@dataclass(frozen=True, slots=True)
class WorkersChanged:
    """Every worker process that this node has, whatever was ordered; replaces what was reported before.

    Sent when the set has changed, unless the answer to `Prepare` has said it. Every beat carries the version of the newest one,
    so that a set that was lost on the way is noticed and asked for again: comparing costs nothing while nothing changes.
    """

    version: int  # grows with every change, per incarnation
    workers: Sequence[RunningWorker] = field(default=())
    ended: tuple[WorkerEnded, ...] = ()  # as in `Hello`
    template: TemplateState | None = None  # as in `Hello`; a change of it is a change of the set


@dataclass(frozen=True, slots=True)
class OrderDone:
    """The answer to one order. `master` is set by the node of rank 0 in answer to `Prepare`."""

    command_id: str
    ok: bool
    reason: str = ""
    master: str = ""
    at: float = 0.0
    phases_s: tuple[
        tuple[str, float], ...
    ] = ()  # for Prepare: ("stop", s), ("fork", s), ("stage", s), ("self_test", s)
    workers: Sequence[RunningWorker] = field(default=())  # for Prepare: the processes that it forked
    # For Prepare: how many shards came from "memory", "disk", "peer", "object store".
    restored_from: tuple[tuple[str, int], ...] = ()
    unrestorable: bool = False  # for Prepare: no source hands out what was to be restored; nothing is said of the node
    restored_bytes: tuple[tuple[str, int], ...] = ()  # for Prepare: how many bytes came from where
    # For Prepare, as in `WorkersChanged`, when `workers` are all that such a report would say; 0 = a report of them follows.
    workers_version: int = 0
    tested: Preflight | None = (
        None  # for Prepare: what the quick tests of a suspected node found; None = none were made
    )
    link: LinkMeasured | None = None  # for CheckLink, of the node that measures; None = the test came to no end


@dataclass(frozen=True, slots=True)
class RanksStepping:
    """These ranks have finished their first step of this generation. `at` is the latest of them, Unix seconds."""

    job: str
    generation: int
    ranks: tuple[int, ...]
    step: int
    at: float
    phases_s: tuple[
        tuple[str, float], ...
    ] = ()  # slowest rank: ("process_group", s), ("restore", s), ("first_step", s)


@dataclass(frozen=True, slots=True)
class RanksFinished:
    """These ranks have ended with exit code 0."""

    job: str
    generation: int
    ranks: tuple[int, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Inventory:
    """Everything that this node's replicator holds for `job`, whole and verified; replaces the previous inventory.

    `stored` are the newest checkpoints that it knows to be complete in the object store, newest first. With a `base` it is a
    difference (`domain.inventories`): `shards` are new or changed, those at `gone` are no longer there.
    """

    job: str
    shards: Sequence[ShardRecord] = field(default=())
    stored: tuple[StoredStep, ...] = field(default=())
    base: int = 0  # number of the report that is changed, the job's last inventory of the session; 0 = complete
    gone: tuple[ShardPlace, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Tested:
    """A node without ranks has tested itself."""

    preflight: Preflight


@dataclass(frozen=True, slots=True)
class StepReached:
    """The newest step that every rank of a node has finished; travels with beats, neither numbered nor acknowledged.

    Of a script that reports no steps, `step` is where it was started from, and `observed` counts the optimizer steps that were
    observed in each rank since (`train.observed_steps`)."""

    job: str
    generation: int
    step: int
    observed: int = 0  # 0 = none
    observed_step_s: float = 0.0  # seconds for one of them, recently


Report = Hello | WorkersChanged | OrderDone | RanksStepping | RanksFinished | Inventory | Tested
