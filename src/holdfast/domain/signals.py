"""Signals: raw observations that agents send and detectors read. No conclusions here.

`at` is always Unix seconds on the agent's clock, taken when the thing happened. A rank's phase is what it said last.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from holdfast.domain.collectives import StallSnapshot
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import Preflight


class Phase(StrEnum):
    INIT = "init"  # forked, process group, building the model
    RESTORE = "restore"
    COMPILE = "compile"
    STEP = "step"
    CHECKPOINT = "checkpoint"
    EVAL = "eval"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """An agent has started its ranks of a generation: what the detectors need to know of it."""

    node: str
    at: float
    job: str
    generation: int
    mesh: Mesh
    ranks: tuple[int, ...]  # on this node
    hang: HangSpec
    submission: str = ""  # tells submissions of one name apart; "" = not known
    warning_settles_s: float = 0.0  # how long a warning must last to lead to anything; 0 = not told


@dataclass(frozen=True, slots=True)
class GenerationStopped:
    """An agent has stopped its ranks of a generation on purpose: silence from here on is no hang, exits are no crash.

    Or, when `finished`, all of them have ended well by themselves; what other nodes' ranks do is judged as before.
    """

    node: str
    at: float
    job: str
    generation: int
    finished: bool = False


@dataclass(frozen=True, slots=True)
class StepColumns:
    """Steps finished on one node since the last tick: one entry per (rank, step), all columns of equal length."""

    node: str
    at: float
    job: str
    generation: int
    rank: tuple[int, ...]
    step: tuple[int, ...]
    started_at: tuple[float, ...]
    ended_at: tuple[float, ...]
    data_s: tuple[float, ...]  # time waiting for data inside the step
    stall_s: tuple[float, ...]  # checkpoint stall since the previous step
    tokens: tuple[int, ...]
    loss: tuple[float, ...]  # NaN = not reported by this rank; a reported NaN travels as +inf
    grad_norm: tuple[float, ...]  # NaN = not reported
    # Time inside the step in which this rank waited for others: NaN, or no column at all, = not measured.
    comm_wait_s: tuple[float, ...] = ()
    # This rank's gradient norm before the reduce: NaN, or no column at all, = not reported; a reported NaN travels as +inf.
    local_grad_norm: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ObservedSteps:
    """Optimizer steps of a script that reports none, as they were observed in its processes: one entry per (rank, block), all
    columns of equal length. They say how ranks compare, and nothing about the job's progress."""

    node: str
    at: float
    job: str
    generation: int
    rank: tuple[int, ...]
    step: tuple[int, ...]  # optimizer steps begun by this process up to the end of the block
    steps: tuple[int, ...]  # of the block, at least 1
    started_at: tuple[float, ...]  # of the block
    ended_at: tuple[float, ...]
    comm_wait_s: tuple[float, ...]  # time in the whole block in which this rank waited for others


@dataclass(frozen=True, slots=True)
class ReplicaChecks:
    """Checksums of the parameters that replicas hold alike: one entry per (rank, step), all columns of equal length."""

    node: str
    at: float
    job: str
    generation: int
    rank: tuple[int, ...]
    step: tuple[int, ...]
    digest: tuple[str, ...]  # empty = this rank holds nothing that another replica holds as well
    took_s: tuple[float, ...]
    restored: tuple[bool, ...]  # right after a restore, before any step


@dataclass(frozen=True, slots=True)
class RankProgress:
    """Where each rank of a node stands at a tick; sent at every tick, also when nothing moved. Columns."""

    node: str
    at: float
    job: str
    generation: int
    rank: tuple[int, ...]
    step: tuple[int, ...]  # steps finished
    phase: tuple[Phase, ...]
    phase_at: tuple[float, ...]  # since when it is in this phase
    process_state: tuple[str, ...]  # /proc/PID/stat letter: R S D T Z, "" = gone
    cpu_s: tuple[float, ...]  # user + system CPU seconds used so far
    collective_seq: tuple[int, ...]  # collectives entered, -1 = not known


@dataclass(frozen=True, slots=True)
class WorkerError:
    """The exception that ended a worker, from its torch error file."""

    type: str
    message: str
    frames: tuple[str, ...] = ()  # "file:line function", innermost last
    at: float = 0.0
    # The newest collectives that the rank has entered, by its flight recorder: columns, for each group its last few.
    call_group: tuple[str, ...] = ()
    call_seq: tuple[int, ...] = ()
    call: tuple[str, ...] = ()  # operation and sizes, in words that are equal when they are
    uptime_s: float = 0.0  # when it was raised, as `WorkerExited.uptime_s`; 0.0 = not known


@dataclass(frozen=True, slots=True)
class WorkerExited:
    node: str
    at: float
    job: str
    generation: int
    rank: int
    pid: int
    exit_code: int | None  # None when a signal ended it
    signal: int | None
    step: int  # last step finished
    expected: bool  # the agent was told to stop it
    error: WorkerError | None = None
    log_tail: tuple[str, ...] = ()
    traceparent: str = ""  # of the signal's own span: what is concluded from it goes on in that trace
    # When its last steps ended, `step` first, by the same clock as `at`: all ranks end a step at about the same time, so what
    # happened when on two machines is told from it without comparing their clocks.
    step_ends: tuple[float, ...] = ()
    # When it ended and when its last steps did, by the monotonic clock of its node, which nobody sets. All processes of a
    # machine share it; between two machines differences of it can be compared. 0.0, () = not known.
    uptime_s: float = 0.0
    step_end_uptimes_s: tuple[float, ...] = ()
    observed: int = 0  # optimizer steps that were observed in it, of a script that reports no steps


class KernelEvent(StrEnum):
    """What a recognised kernel line is about. Diagnostics decides what that means."""

    XID = "xid"
    OFF_THE_BUS = "off_the_bus"  # the driver says it in words, without a code
    OOM_KILL = "oom_kill"
    SOFT_LOCKUP = "soft_lockup"
    HUNG_TASK = "hung_task"
    NVME_TIMEOUT = "nvme_timeout"
    READ_ONLY = "read_only"  # a file system was remounted read-only
    MLX5_HEALTH = "mlx5_health"
    MLX5_COMMAND = "mlx5_command"  # the adapter's firmware does not answer commands
    MACHINE_CHECK = "machine_check"
    NCCL_SEGFAULT = "nccl_segfault"
    OTHER = "other"  # from an agent that does not say, or says what is not known here


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One kernel-log line that a collector recognised, or an Xid that NVML reported by itself (its text says so).

    `gpu` is resolved from the PCI address when possible.
    """

    node: str
    at: float
    text: str
    xid: int | None = None
    pci: str = ""
    gpu: int | None = None
    event: KernelEvent = KernelEvent.OTHER
    traceparent: str = ""  # as in `WorkerExited`


@dataclass(frozen=True, slots=True)
class HostSample:
    node: str
    at: float
    load1: float
    cpus: int
    memory_used: int  # bytes
    memory_total: int
    disks: tuple[tuple[str, int, int], ...] = ()  # (path, used bytes, total bytes)
    disk_latency: tuple[tuple[str, float], ...] = ()  # (path, seconds of one fsynced write; inf = it cannot be)
    blocked: int | None = None  # tasks in uninterruptible sleep (D)
    clock_offset_s: float | None = None  # of the kernel's clock discipline; None = it is not synchronised
    files_left: int | None = None  # file descriptors that the agent has left for new work; 0 = it takes none
    files_max: int | None = None  # its limit


@dataclass(frozen=True, slots=True)
class GpuSample:
    """Columns over the GPUs of a node. `recovery_action` is NVML field 230, the driver's own verdict; -1 = not known."""

    node: str
    at: float
    gpu: tuple[int, ...]
    uuid: tuple[str, ...]
    temperature_c: tuple[float, ...]
    power_w: tuple[float, ...]
    memory_used: tuple[int, ...]
    ecc_uncorrected: tuple[int, ...]  # volatile
    recovery_action: tuple[int, ...]
    lost: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """What changes slowly about the GPUs of a node, read less often than `GpuSample`. Columns; -1 = not known.

    Counters are cumulative as the driver keeps them; a driver that is loaded again starts them again.
    """

    node: str
    at: float
    expected: int  # devices that this node should have; 0 = nobody said
    gpu: tuple[int, ...]
    uuid: tuple[str, ...]
    ecc_corrected: tuple[int, ...]  # volatile: since the driver was loaded
    ecc_uncorrected_ever: tuple[int, ...]  # aggregate: over the life of the board
    remapped_rows: tuple[int, ...]  # for uncorrectable errors
    remap_pending: tuple[int, ...]  # 1 = a reset is needed to finish it
    remap_failed: tuple[int, ...]  # 1 = no spare row is left: the board is to be returned
    nvlinks_up: tuple[int, ...]
    nvlinks_down: tuple[int, ...]
    nvlink_errors: tuple[int, ...]  # data link: replay + recovery + CRC
    pcie_replays: tuple[int, ...]
    pcie_width: tuple[int, ...]  # lanes now
    pcie_width_max: tuple[int, ...]
    pcie_gen: tuple[int, ...]  # now; idle GPUs shift down, so compare under load
    pcie_gen_max: tuple[int, ...]
    utilization: tuple[int, ...]  # percent
    thermal_slowdown_ns: tuple[int, ...]  # software + hardware
    power_brake_ns: tuple[int, ...]
    margin_c: tuple[float, ...]  # degrees below the first slowdown; +inf = not known
    fabric_state: tuple[int, ...]  # NVML: 1 not started, 2 in progress, 3 completed, 0 = has none
    fabric_health: tuple[int, ...]  # NVML's mask
    rejected: tuple[int, ...]  # NVML calls of this reading that failed for another reason than "not supported"


@dataclass(frozen=True, slots=True)
class NicSample:
    """InfiniBand and RoCE ports of a node, from /sys/class/infiniband. Columns; counters are cumulative, -1 = not there."""

    node: str
    at: float
    device: tuple[str, ...]
    port: tuple[int, ...]
    link_layer: tuple[str, ...]  # "InfiniBand" or "Ethernet"
    state: tuple[str, ...]  # "ACTIVE", "DOWN", "INIT", "ARMED"
    phys_state: tuple[str, ...]  # "LinkUp", "Disabled", "Polling" …
    symbol_errors: tuple[int, ...]
    link_downed: tuple[int, ...]
    link_recoveries: tuple[int, ...]
    buffer_overruns: tuple[int, ...]
    integrity_errors: tuple[int, ...]
    rnr_retries: tuple[int, ...]  # rnr_nak_retry_err
    slow_restarts: tuple[int, ...]  # roce_slow_restart


class Verdict(StrEnum):
    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"  # it could not look: neither healthy nor faulty


@dataclass(frozen=True, slots=True)
class HealthChecks:
    """What the health checks of another tool say. Columns: one row per check and GPU."""

    node: str
    at: float
    tool: str  # its name and version, "nvrx 0.4.1"
    check: tuple[str, ...]  # "gpu", "nvlink", "nic", "nic_state"
    gpu: tuple[int, ...]  # -1 = the whole node
    verdict: tuple[Verdict, ...]
    reason: tuple[str, ...]  # in the tool's own words


@dataclass(frozen=True, slots=True)
class Measurements:
    """What a plug-in's collector has measured, for a plug-in's detector. Columns. Holdfast's own detectors do not read it."""

    node: str
    at: float
    source: str  # the collector's name
    name: tuple[str, ...]  # unit last: "pump_rpm", "inlet_c"
    value: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MaintenanceNotice:
    """The owner of the machine announces that it will be taken, or (`event` empty) that it will not after all."""

    node: str
    at: float
    source: str  # "file", "gce", or `nodes.TERMINATION`
    event: str  # as announced: "TERMINATE_ON_HOST_MAINTENANCE", or what the file says
    starts_at: float | None = None
    incarnation: str = ""  # of the agent that was told to end; empty: the notice is of the machine


@dataclass(frozen=True, slots=True)
class CheckpointTrouble:
    """Something keeps checkpoints of a job from being made, moved or kept on this node. `kind` is a
    `domain.replication.TroubleKind`, or one of a newer agent."""

    node: str
    at: float
    job: str
    kind: str
    place: str  # a path, a tier, "rank 3"
    reason: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class CollectorSilent:
    """A collector missed its deadline `misses` times in a row: a wedged driver is itself a signal."""

    node: str
    at: float
    collector: str
    misses: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NodeTested:
    """A node has tested itself, because it is idle or because it is suspected."""

    node: str
    at: float
    preflight: Preflight


@dataclass(frozen=True, slots=True)
class NodeConnected:
    """diagnostics' own: an agent opened its telemetry stream."""

    node: str
    at: float
    incarnation: str


@dataclass(frozen=True, slots=True)
class NodeBeat:
    """diagnostics' own: a tick arrived (every tick is a beat). `at` is on diagnostics' clock."""

    node: str
    at: float


@dataclass(frozen=True, slots=True)
class NodeDisconnected:
    """diagnostics' own: the telemetry stream ended. `clean` = the agent said goodbye."""

    node: str
    at: float
    clean: bool = False


@dataclass(frozen=True, slots=True)
class ClockTick:
    """diagnostics' own: time passes; detectors conclude from silence here."""

    at: float


NodeSignal = (
    GenerationStarted
    | GenerationStopped
    | StepColumns
    | ObservedSteps
    | RankProgress
    | WorkerExited
    | KernelLine
    | HostSample
    | GpuSample
    | GpuHealth
    | NicSample
    | HealthChecks
    | Measurements
    | MaintenanceNotice
    | CheckpointTrouble
    | CollectorSilent
    | ReplicaChecks
    | NodeTested
    | StallSnapshot
)
Signal = NodeSignal | NodeConnected | NodeBeat | NodeDisconnected | ClockTick

# Never dropped, sent again until acknowledged; the rest is dropped oldest-first when a buffer is full.
RELIABLE = (
    GenerationStarted, GenerationStopped, WorkerExited, KernelLine, MaintenanceNotice, NodeTested, CheckpointTrouble,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tick:
    """What one agent sends at once: columnar, numbered per incarnation."""

    node: str
    incarnation: str
    seq: int
    at: float
    signals: tuple[NodeSignal, ...] = field(default=())
    dropped: int = 0  # signals dropped since the start because a buffer was full
