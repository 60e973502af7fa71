"""Signals: raw observations that agents send and detectors read. Signals contain no conclusions.

`at` is the time of the event, in Unix seconds of the agent's clock. A rank's phase is the last one that it has reported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from holdfast.domain.collectives import StallSnapshot
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import Preflight


class Phase(StrEnum):
    INIT = "init"  # from the fork: process group, building the model
    RESTORE = "restore"
    COMPILE = "compile"
    STEP = "step"
    CHECKPOINT = "checkpoint"
    EVAL = "eval"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """An agent has started its ranks of a generation. Contains what detectors need to know about the generation."""

    node: str
    at: float
    job: str
    generation: int
    mesh: Mesh
    ranks: tuple[int, ...]  # on this node
    hang: HangSpec
    submission: str = ""  # distinguishes submissions of the same job name; "" = not known
    warning_settles_s: float = 0.0  # how long a warning must last before the policy is asked; 0 = not reported
    learned_start: bool = False  # the ranks have modules that earlier ones have imported (`preload: [auto]`)


@dataclass(frozen=True, slots=True)
class GenerationStopped:
    """An agent has stopped its ranks of a generation on purpose. From now on silence is not a hang and exits are not crashes.

    With `finished`, all ranks of the node have ended successfully by themselves; ranks of other nodes are judged as before.
    """

    node: str
    at: float
    job: str
    generation: int
    finished: bool = False
    submission: str = ""  # as in `GenerationStarted`


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
    loss: tuple[float, ...]  # NaN = not reported by this rank; a reported NaN is sent as +inf
    grad_norm: tuple[float, ...]  # NaN = not reported
    # Time inside the step for which this rank waited for others. NaN or an empty column = not measured.
    comm_wait_s: tuple[float, ...] = ()
    # This rank's gradient norm before the reduce. NaN or an empty column = not reported; a reported NaN is sent as +inf.
    local_grad_norm: tuple[float, ...] = ()
    flops: tuple[float, ...] = ()  # of this rank; 0.0 or an empty column = not reported


@dataclass(frozen=True, slots=True)
class ObservedSteps:
    """Blocks of optimizer steps that were observed in the processes of a script that reports no steps: one entry per (rank,
    block), all columns of equal length. They are used to compare ranks, not to judge the job's progress."""

    node: str
    at: float
    job: str
    generation: int
    rank: tuple[int, ...]
    step: tuple[int, ...]  # optimizer steps begun by this process up to the end of the block
    steps: tuple[int, ...]  # number of steps in the block, at least 1
    started_at: tuple[float, ...]  # start of the block
    ended_at: tuple[float, ...]
    comm_wait_s: tuple[float, ...]  # time in the block for which this rank waited for others


@dataclass(frozen=True, slots=True)
class ReplicaChecks:
    """Checksums of the parameters that are equal in all replicas: one entry per (rank, step), all columns of equal length."""

    node: str
    at: float
    job: str
    generation: int
    rank: tuple[int, ...]
    step: tuple[int, ...]
    digest: tuple[str, ...]  # empty = this rank has no parameter that another replica has as well
    duration_s: tuple[float, ...]
    restored: tuple[bool, ...]  # the check was made directly after a restore, before any step


@dataclass(frozen=True, slots=True)
class RankProgress:
    """Progress of each rank of a node at a tick. Sent at every tick, also without a change. Columns."""

    node: str
    at: float
    job: str
    generation: int
    rank: tuple[int, ...]
    step: tuple[int, ...]  # steps finished
    phase: tuple[Phase, ...]
    phase_at: tuple[float, ...]  # when the rank entered this phase
    process_state: tuple[str, ...]  # /proc/PID/stat letter: R S D T Z, "" = the process has ended
    cpu_s: tuple[float, ...]  # user + system CPU seconds used so far
    collective_seq: tuple[int, ...]  # collectives entered, -1 = not known
    observed: tuple[int, ...] = ()  # observed optimizer steps, if the script reports no steps; () = none in any rank


@dataclass(frozen=True, slots=True)
class WorkerError:
    """The exception that ended a worker, from its torch error file."""

    type: str
    message: str
    frames: tuple[str, ...] = ()  # "file:line function", innermost last
    at: float = 0.0
    # The newest collectives that the rank has entered, from its flight recorder: columns, the last few of each group.
    call_group: tuple[str, ...] = ()
    call_seq: tuple[int, ...] = ()
    call: tuple[str, ...] = ()  # operation and sizes, as a text that is equal if they are equal
    uptime_s: float = 0.0  # when the exception was raised, by the clock of `WorkerExited.uptime_s`; 0.0 = not known


@dataclass(frozen=True, slots=True)
class WorkerExited:
    node: str
    at: float
    job: str
    generation: int
    rank: int
    pid: int
    exit_code: int | None  # None if a POSIX signal ended the process
    signal: int | None  # POSIX signal
    step: int  # last step finished
    expected: bool  # the agent has stopped the worker on an order
    error: WorkerError | None = None
    log_tail: tuple[str, ...] = ()
    traceparent: str = ""  # of the signal's own span; findings that follow from the signal belong to the same trace
    # Ends of the rank's last steps, `step` first, by the same clock as `at`. All ranks end a step at about the same time, so
    # the order of failures on two machines can be derived from these times without comparing the machines' clocks.
    step_ends: tuple[float, ...] = ()
    # End of the process, and ends of its last steps, by the monotonic clock of its node, which cannot be set. All processes of
    # a machine share this clock; only differences can be compared between machines. 0.0 and () = not known.
    uptime_s: float = 0.0
    step_end_uptimes_s: tuple[float, ...] = ()
    observed: int = 0  # optimizer steps that were observed in the worker, if the script reports no steps
    submission: str = ""  # as in `GenerationStarted`
    # It was forked from a template with learned modules, and its generation made no step on this node. The next start here is
    # made without these modules.
    learned_start: bool = False


class KernelEvent(StrEnum):
    """The event that a recognised kernel line reports. Diagnostics decides what the event means."""

    XID = "xid"
    OFF_THE_BUS = "off_the_bus"  # the driver's message without an Xid code
    OOM_KILL = "oom_kill"
    SOFT_LOCKUP = "soft_lockup"  # or a hard one, or a CPU that RCU waits for
    HUNG_TASK = "hung_task"
    OOPS = "oops"  # an error in the kernel itself
    PCIE = "pcie"  # a device with a fatal error of its PCIe link, or without a link
    NVME_TIMEOUT = "nvme_timeout"
    DISK_ERROR = "disk_error"
    FILE_SYSTEM = "file_system"  # its structure is damaged, or cannot be read or written
    READ_ONLY = "read_only"  # a file system was remounted read-only, or shut down
    MLX5_HEALTH = "mlx5_health"
    MLX5_COMMAND = "mlx5_command"  # the adapter's firmware does not answer commands
    ADAPTER_HARDWARE = "adapter_hardware"  # a cable, the temperature or the power of a network adapter
    ADAPTER_STALL = "adapter_stall"  # a network adapter does not send any more
    NVSWITCH = "nvswitch"  # a fatal SXid
    ACCELERATOR = "accelerator"  # a fault of an accelerator that is not NVIDIA's
    MACHINE_CHECK = "machine_check"
    NCCL_SEGFAULT = "nccl_segfault"
    OTHER = "other"  # the agent reported no event, or one that this version does not know


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One kernel-log line that a collector recognised, or an Xid that NVML reported by itself (recognisable by its text).

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
    disk_latency: tuple[tuple[str, float], ...] = ()  # (path, seconds of one fsynced write; inf = the write failed)
    blocked: int | None = None  # tasks in uninterruptible sleep (D)
    clock_offset_s: float | None = None  # of the kernel's clock discipline; None = the clock is not synchronised
    files_left: int | None = None  # file descriptors that the agent has left for new work; 0 = it accepts no new work
    files_max: int | None = None  # the agent's limit of file descriptors


@dataclass(frozen=True, slots=True)
class GpuSample:
    """Columns over the GPUs of a node. `recovery_action`: NVML field 230, the action that the driver requests; -1 = unknown."""

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
    """Slowly changing values of the GPUs of a node, read less often than `GpuSample`. Columns; -1 = not known.

    Counters are cumulative, as the driver keeps them. They restart when the driver is loaded again.
    """

    node: str
    at: float
    expected: int  # devices that this node should have; 0 = not configured
    gpu: tuple[int, ...]
    uuid: tuple[str, ...]
    ecc_corrected: tuple[int, ...]  # volatile: since the driver was loaded
    ecc_uncorrected_ever: tuple[int, ...]  # aggregate: over the life of the board
    remapped_rows: tuple[int, ...]  # for uncorrectable errors
    remap_pending: tuple[int, ...]  # 1 = a reset is needed to finish the remapping
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
    """InfiniBand and RoCE ports of a node, from /sys/class/infiniband. Columns. Counters are cumulative; -1 = missing."""

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
    SKIPPED = "skipped"  # the check could not run: neither healthy nor faulty


@dataclass(frozen=True, slots=True)
class HealthChecks:
    """Results of the health checks of another tool. Columns: one row per check and GPU."""

    node: str
    at: float
    tool: str  # its name and version, "nvrx 0.4.1"
    check: tuple[str, ...]  # "gpu", "nvlink", "nic", "nic_state"
    gpu: tuple[int, ...]  # -1 = the whole node
    verdict: tuple[Verdict, ...]
    reason: tuple[str, ...]  # the tool's own text


@dataclass(frozen=True, slots=True)
class Measurements:
    """Values that a plug-in's collector measures for a plug-in's detector. Columns. Holdfast's own detectors ignore them."""

    node: str
    at: float
    source: str  # the collector's name
    name: tuple[str, ...]  # unit last: "pump_rpm", "inlet_c"
    value: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MaintenanceNotice:
    """The owner of the machine announces that the machine will be taken away, or (`event` empty) withdraws the announcement."""

    node: str
    at: float
    source: str  # "file", "gce", or `nodes.TERMINATION`
    event: str  # as announced: "TERMINATE_ON_HOST_MAINTENANCE", or the content of the file
    starts_at: float | None = None
    incarnation: str = ""  # of the agent that was asked to end; empty: the notice is about the machine


@dataclass(frozen=True, slots=True)
class CheckpointTrouble:
    """Checkpoints of a job cannot be made, copied or kept on this node. `kind` is a `domain.replication.TroubleKind`, or a kind
    that a newer agent reports."""

    node: str
    at: float
    job: str
    kind: str
    place: str  # a path, a tier, "rank 3"
    reason: str
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class CollectorSilent:
    """A collector missed its deadline `misses` times in a row. A driver that does not return is itself a signal."""

    node: str
    at: float
    collector: str
    misses: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NodeTested:
    """A node has run its pre-flight test, because it is idle or a suspect."""

    node: str
    at: float
    preflight: Preflight


@dataclass(frozen=True, slots=True)
class NodeConnected:
    """Created by diagnostics: an agent opened its telemetry stream."""

    node: str
    at: float
    incarnation: str


@dataclass(frozen=True, slots=True)
class NodeBeat:
    """Created by diagnostics: a tick arrived (every tick is a heartbeat). `at` is a time of diagnostics' clock."""

    node: str
    at: float


@dataclass(frozen=True, slots=True)
class NodeDisconnected:
    """Created by diagnostics: a telemetry stream ended. `clean`: the agent announced it, or diagnostics refused the stream."""

    node: str
    at: float
    clean: bool = False


@dataclass(frozen=True, slots=True)
class ClockTick:
    """Created by diagnostics: time has passed. Detectors conclude from silence at clock ticks."""

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

# Never dropped, and sent again until acknowledged. Other signals are dropped, oldest first, if a buffer is full.
RELIABLE = (
    GenerationStarted, GenerationStopped, WorkerExited, KernelLine, MaintenanceNotice, NodeTested, CheckpointTrouble,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tick:
    """One telemetry message of an agent: columnar, numbered per incarnation."""

    node: str
    incarnation: str
    seq: int
    at: float
    signals: tuple[NodeSignal, ...] = field(default=())
    dropped: int = 0  # signals dropped since the agent's start because a buffer was full
