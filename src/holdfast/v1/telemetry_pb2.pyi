from holdfast.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Verdict(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERDICT_UNSPECIFIED: _ClassVar[Verdict]
    VERDICT_OK: _ClassVar[Verdict]
    VERDICT_FAILED: _ClassVar[Verdict]
    VERDICT_SKIPPED: _ClassVar[Verdict]
VERDICT_UNSPECIFIED: Verdict
VERDICT_OK: Verdict
VERDICT_FAILED: Verdict
VERDICT_SKIPPED: Verdict

class Tick(_message.Message):
    __slots__ = ("node", "incarnation", "seq", "at", "dropped", "protocol_version", "traceparent", "goodbye", "wants_ack", "generation_started", "generation_stopped", "steps", "progress", "worker_exited", "kernel_lines", "host", "gpus", "collectors_silent", "gpu_health", "nics", "maintenance", "replica_checks", "node_tested", "standstills", "health_checks", "checkpoint_troubles", "measurements", "observed_steps")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    WANTS_ACK_FIELD_NUMBER: _ClassVar[int]
    GENERATION_STARTED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_STOPPED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    WORKER_EXITED_FIELD_NUMBER: _ClassVar[int]
    KERNEL_LINES_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    COLLECTORS_SILENT_FIELD_NUMBER: _ClassVar[int]
    GPU_HEALTH_FIELD_NUMBER: _ClassVar[int]
    NICS_FIELD_NUMBER: _ClassVar[int]
    MAINTENANCE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_CHECKS_FIELD_NUMBER: _ClassVar[int]
    NODE_TESTED_FIELD_NUMBER: _ClassVar[int]
    STANDSTILLS_FIELD_NUMBER: _ClassVar[int]
    HEALTH_CHECKS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_TROUBLES_FIELD_NUMBER: _ClassVar[int]
    MEASUREMENTS_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_STEPS_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: str
    seq: int
    at: float
    dropped: int
    protocol_version: int
    traceparent: str
    goodbye: bool
    wants_ack: bool
    generation_started: _containers.RepeatedCompositeFieldContainer[GenerationStarted]
    generation_stopped: _containers.RepeatedCompositeFieldContainer[GenerationStopped]
    steps: _containers.RepeatedCompositeFieldContainer[StepColumns]
    progress: _containers.RepeatedCompositeFieldContainer[RankProgress]
    worker_exited: _containers.RepeatedCompositeFieldContainer[WorkerExited]
    kernel_lines: _containers.RepeatedCompositeFieldContainer[KernelLine]
    host: _containers.RepeatedCompositeFieldContainer[HostSample]
    gpus: _containers.RepeatedCompositeFieldContainer[GpuSample]
    collectors_silent: _containers.RepeatedCompositeFieldContainer[CollectorSilent]
    gpu_health: _containers.RepeatedCompositeFieldContainer[GpuHealth]
    nics: _containers.RepeatedCompositeFieldContainer[NicSample]
    maintenance: _containers.RepeatedCompositeFieldContainer[MaintenanceNotice]
    replica_checks: _containers.RepeatedCompositeFieldContainer[ReplicaChecks]
    node_tested: _containers.RepeatedCompositeFieldContainer[NodeTested]
    standstills: _containers.RepeatedCompositeFieldContainer[Standstill]
    health_checks: _containers.RepeatedCompositeFieldContainer[HealthChecks]
    checkpoint_troubles: _containers.RepeatedCompositeFieldContainer[CheckpointTrouble]
    measurements: _containers.RepeatedCompositeFieldContainer[Measurements]
    observed_steps: _containers.RepeatedCompositeFieldContainer[ObservedSteps]
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[str] = ..., seq: _Optional[int] = ..., at: _Optional[float] = ..., dropped: _Optional[int] = ..., protocol_version: _Optional[int] = ..., traceparent: _Optional[str] = ..., goodbye: bool = ..., wants_ack: bool = ..., generation_started: _Optional[_Iterable[_Union[GenerationStarted, _Mapping]]] = ..., generation_stopped: _Optional[_Iterable[_Union[GenerationStopped, _Mapping]]] = ..., steps: _Optional[_Iterable[_Union[StepColumns, _Mapping]]] = ..., progress: _Optional[_Iterable[_Union[RankProgress, _Mapping]]] = ..., worker_exited: _Optional[_Iterable[_Union[WorkerExited, _Mapping]]] = ..., kernel_lines: _Optional[_Iterable[_Union[KernelLine, _Mapping]]] = ..., host: _Optional[_Iterable[_Union[HostSample, _Mapping]]] = ..., gpus: _Optional[_Iterable[_Union[GpuSample, _Mapping]]] = ..., collectors_silent: _Optional[_Iterable[_Union[CollectorSilent, _Mapping]]] = ..., gpu_health: _Optional[_Iterable[_Union[GpuHealth, _Mapping]]] = ..., nics: _Optional[_Iterable[_Union[NicSample, _Mapping]]] = ..., maintenance: _Optional[_Iterable[_Union[MaintenanceNotice, _Mapping]]] = ..., replica_checks: _Optional[_Iterable[_Union[ReplicaChecks, _Mapping]]] = ..., node_tested: _Optional[_Iterable[_Union[NodeTested, _Mapping]]] = ..., standstills: _Optional[_Iterable[_Union[Standstill, _Mapping]]] = ..., health_checks: _Optional[_Iterable[_Union[HealthChecks, _Mapping]]] = ..., checkpoint_troubles: _Optional[_Iterable[_Union[CheckpointTrouble, _Mapping]]] = ..., measurements: _Optional[_Iterable[_Union[Measurements, _Mapping]]] = ..., observed_steps: _Optional[_Iterable[_Union[ObservedSteps, _Mapping]]] = ...) -> None: ...

class Standstill(_message.Message):
    __slots__ = ("at", "job", "generation", "rank", "answered", "interpreter", "kernel", "stack", "rows", "messages")
    AT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    INTERPRETER_FIELD_NUMBER: _ClassVar[int]
    KERNEL_FIELD_NUMBER: _ClassVar[int]
    STACK_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    at: float
    job: str
    generation: int
    rank: _containers.RepeatedScalarFieldContainer[int]
    answered: _containers.RepeatedScalarFieldContainer[bool]
    interpreter: _containers.RepeatedScalarFieldContainer[str]
    kernel: _containers.RepeatedScalarFieldContainer[str]
    stack: _containers.RepeatedScalarFieldContainer[str]
    rows: CollectiveRows
    messages: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, at: _Optional[float] = ..., job: _Optional[str] = ..., generation: _Optional[int] = ..., rank: _Optional[_Iterable[int]] = ..., answered: _Optional[_Iterable[bool]] = ..., interpreter: _Optional[_Iterable[str]] = ..., kernel: _Optional[_Iterable[str]] = ..., stack: _Optional[_Iterable[str]] = ..., rows: _Optional[_Union[CollectiveRows, _Mapping]] = ..., messages: _Optional[_Iterable[bool]] = ...) -> None: ...

class CollectiveRows(_message.Message):
    __slots__ = ("rank", "group", "members", "kind", "sizes", "peer", "entered", "pending")
    RANK_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    ENTERED_FIELD_NUMBER: _ClassVar[int]
    PENDING_FIELD_NUMBER: _ClassVar[int]
    rank: _containers.RepeatedScalarFieldContainer[int]
    group: _containers.RepeatedScalarFieldContainer[str]
    members: _containers.RepeatedScalarFieldContainer[str]
    kind: _containers.RepeatedScalarFieldContainer[str]
    sizes: _containers.RepeatedScalarFieldContainer[str]
    peer: _containers.RepeatedScalarFieldContainer[int]
    entered: _containers.RepeatedScalarFieldContainer[int]
    pending: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rank: _Optional[_Iterable[int]] = ..., group: _Optional[_Iterable[str]] = ..., members: _Optional[_Iterable[str]] = ..., kind: _Optional[_Iterable[str]] = ..., sizes: _Optional[_Iterable[str]] = ..., peer: _Optional[_Iterable[int]] = ..., entered: _Optional[_Iterable[int]] = ..., pending: _Optional[_Iterable[int]] = ...) -> None: ...

class TickAck(_message.Message):
    __slots__ = ("seq", "version")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    seq: int
    version: str
    def __init__(self, seq: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class GenerationStarted(_message.Message):
    __slots__ = ("at", "job", "generation", "mesh", "ranks", "hang", "submission", "warning_settles_s", "learned_start")
    AT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    HANG_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    WARNING_SETTLES_S_FIELD_NUMBER: _ClassVar[int]
    LEARNED_START_FIELD_NUMBER: _ClassVar[int]
    at: float
    job: str
    generation: int
    mesh: _types_pb2.Mesh
    ranks: _containers.RepeatedScalarFieldContainer[int]
    hang: _types_pb2.HangSpec
    submission: str
    warning_settles_s: float
    learned_start: bool
    def __init__(self, at: _Optional[float] = ..., job: _Optional[str] = ..., generation: _Optional[int] = ..., mesh: _Optional[_Union[_types_pb2.Mesh, _Mapping]] = ..., ranks: _Optional[_Iterable[int]] = ..., hang: _Optional[_Union[_types_pb2.HangSpec, _Mapping]] = ..., submission: _Optional[str] = ..., warning_settles_s: _Optional[float] = ..., learned_start: bool = ...) -> None: ...

class GenerationStopped(_message.Message):
    __slots__ = ("at", "job", "generation", "finished", "submission")
    AT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    at: float
    job: str
    generation: int
    finished: bool
    submission: str
    def __init__(self, at: _Optional[float] = ..., job: _Optional[str] = ..., generation: _Optional[int] = ..., finished: bool = ..., submission: _Optional[str] = ...) -> None: ...

class StepColumns(_message.Message):
    __slots__ = ("at", "job", "generation", "rank", "step", "started_at", "ended_at", "data_s", "stall_s", "tokens", "loss", "grad_norm", "comm_wait_s", "local_grad_norm", "flops")
    AT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    DATA_S_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    COMM_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    LOCAL_GRAD_NORM_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    at: float
    job: str
    generation: int
    rank: _containers.RepeatedScalarFieldContainer[int]
    step: _containers.RepeatedScalarFieldContainer[int]
    started_at: _containers.RepeatedScalarFieldContainer[float]
    ended_at: _containers.RepeatedScalarFieldContainer[float]
    data_s: _containers.RepeatedScalarFieldContainer[float]
    stall_s: _containers.RepeatedScalarFieldContainer[float]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    loss: _containers.RepeatedScalarFieldContainer[float]
    grad_norm: _containers.RepeatedScalarFieldContainer[float]
    comm_wait_s: _containers.RepeatedScalarFieldContainer[float]
    local_grad_norm: _containers.RepeatedScalarFieldContainer[float]
    flops: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, at: _Optional[float] = ..., job: _Optional[str] = ..., generation: _Optional[int] = ..., rank: _Optional[_Iterable[int]] = ..., step: _Optional[_Iterable[int]] = ..., started_at: _Optional[_Iterable[float]] = ..., ended_at: _Optional[_Iterable[float]] = ..., data_s: _Optional[_Iterable[float]] = ..., stall_s: _Optional[_Iterable[float]] = ..., tokens: _Optional[_Iterable[int]] = ..., loss: _Optional[_Iterable[float]] = ..., grad_norm: _Optional[_Iterable[float]] = ..., comm_wait_s: _Optional[_Iterable[float]] = ..., local_grad_norm: _Optional[_Iterable[float]] = ..., flops: _Optional[_Iterable[float]] = ...) -> None: ...

class ReplicaChecks(_message.Message):
    __slots__ = ("at", "job", "generation", "rank", "step", "digest", "took_s", "restored")
    AT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    at: float
    job: str
    generation: int
    rank: _containers.RepeatedScalarFieldContainer[int]
    step: _containers.RepeatedScalarFieldContainer[int]
    digest: _containers.RepeatedScalarFieldContainer[str]
    took_s: _containers.RepeatedScalarFieldContainer[float]
    restored: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, at: _Optional[float] = ..., job: _Optional[str] = ..., generation: _Optional[int] = ..., rank: _Optional[_Iterable[int]] = ..., step: _Optional[_Iterable[int]] = ..., digest: _Optional[_Iterable[str]] = ..., took_s: _Optional[_Iterable[float]] = ..., restored: _Optional[_Iterable[bool]] = ...) -> None: ...

class ObservedSteps(_message.Message):
    __slots__ = ("at", "job", "generation", "rank", "step", "steps", "started_at", "ended_at", "comm_wait_s")
    AT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    COMM_WAIT_S_FIELD_NUMBER: _ClassVar[int]
    at: float
    job: str
    generation: int
    rank: _containers.RepeatedScalarFieldContainer[int]
    step: _containers.RepeatedScalarFieldContainer[int]
    steps: _containers.RepeatedScalarFieldContainer[int]
    started_at: _containers.RepeatedScalarFieldContainer[float]
    ended_at: _containers.RepeatedScalarFieldContainer[float]
    comm_wait_s: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, at: _Optional[float] = ..., job: _Optional[str] = ..., generation: _Optional[int] = ..., rank: _Optional[_Iterable[int]] = ..., step: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[int]] = ..., started_at: _Optional[_Iterable[float]] = ..., ended_at: _Optional[_Iterable[float]] = ..., comm_wait_s: _Optional[_Iterable[float]] = ...) -> None: ...

class NodeTested(_message.Message):
    __slots__ = ("at", "preflight")
    AT_FIELD_NUMBER: _ClassVar[int]
    PREFLIGHT_FIELD_NUMBER: _ClassVar[int]
    at: float
    preflight: _types_pb2.Preflight
    def __init__(self, at: _Optional[float] = ..., preflight: _Optional[_Union[_types_pb2.Preflight, _Mapping]] = ...) -> None: ...

class RankProgress(_message.Message):
    __slots__ = ("at", "job", "generation", "rank", "step", "phase", "phase_at", "process_state", "cpu_s", "collective_seq", "observed")
    AT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    PHASE_AT_FIELD_NUMBER: _ClassVar[int]
    PROCESS_STATE_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    COLLECTIVE_SEQ_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    at: float
    job: str
    generation: int
    rank: _containers.RepeatedScalarFieldContainer[int]
    step: _containers.RepeatedScalarFieldContainer[int]
    phase: _containers.RepeatedScalarFieldContainer[_types_pb2.Phase]
    phase_at: _containers.RepeatedScalarFieldContainer[float]
    process_state: _containers.RepeatedScalarFieldContainer[str]
    cpu_s: _containers.RepeatedScalarFieldContainer[float]
    collective_seq: _containers.RepeatedScalarFieldContainer[int]
    observed: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, at: _Optional[float] = ..., job: _Optional[str] = ..., generation: _Optional[int] = ..., rank: _Optional[_Iterable[int]] = ..., step: _Optional[_Iterable[int]] = ..., phase: _Optional[_Iterable[_Union[_types_pb2.Phase, str]]] = ..., phase_at: _Optional[_Iterable[float]] = ..., process_state: _Optional[_Iterable[str]] = ..., cpu_s: _Optional[_Iterable[float]] = ..., collective_seq: _Optional[_Iterable[int]] = ..., observed: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerError(_message.Message):
    __slots__ = ("type", "message", "frames", "at", "call_group", "call_seq", "call", "uptime_s")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    CALL_GROUP_FIELD_NUMBER: _ClassVar[int]
    CALL_SEQ_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    frames: _containers.RepeatedScalarFieldContainer[str]
    at: float
    call_group: _containers.RepeatedScalarFieldContainer[str]
    call_seq: _containers.RepeatedScalarFieldContainer[int]
    call: _containers.RepeatedScalarFieldContainer[str]
    uptime_s: float
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., frames: _Optional[_Iterable[str]] = ..., at: _Optional[float] = ..., call_group: _Optional[_Iterable[str]] = ..., call_seq: _Optional[_Iterable[int]] = ..., call: _Optional[_Iterable[str]] = ..., uptime_s: _Optional[float] = ...) -> None: ...

class WorkerExited(_message.Message):
    __slots__ = ("at", "job", "generation", "rank", "pid", "exit_code", "signal", "step", "expected", "error", "log_tail", "traceparent", "step_ends", "uptime_s", "step_end_uptimes_s", "observed", "submission", "learned_start")
    AT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LOG_TAIL_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    STEP_ENDS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    STEP_END_UPTIMES_S_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    SUBMISSION_FIELD_NUMBER: _ClassVar[int]
    LEARNED_START_FIELD_NUMBER: _ClassVar[int]
    at: float
    job: str
    generation: int
    rank: int
    pid: int
    exit_code: int
    signal: int
    step: int
    expected: bool
    error: WorkerError
    log_tail: _containers.RepeatedScalarFieldContainer[str]
    traceparent: str
    step_ends: _containers.RepeatedScalarFieldContainer[float]
    uptime_s: float
    step_end_uptimes_s: _containers.RepeatedScalarFieldContainer[float]
    observed: int
    submission: str
    learned_start: bool
    def __init__(self, at: _Optional[float] = ..., job: _Optional[str] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., pid: _Optional[int] = ..., exit_code: _Optional[int] = ..., signal: _Optional[int] = ..., step: _Optional[int] = ..., expected: bool = ..., error: _Optional[_Union[WorkerError, _Mapping]] = ..., log_tail: _Optional[_Iterable[str]] = ..., traceparent: _Optional[str] = ..., step_ends: _Optional[_Iterable[float]] = ..., uptime_s: _Optional[float] = ..., step_end_uptimes_s: _Optional[_Iterable[float]] = ..., observed: _Optional[int] = ..., submission: _Optional[str] = ..., learned_start: bool = ...) -> None: ...

class KernelLine(_message.Message):
    __slots__ = ("at", "text", "xid", "pci", "gpu", "event", "traceparent")
    AT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    XID_FIELD_NUMBER: _ClassVar[int]
    PCI_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    at: float
    text: str
    xid: int
    pci: str
    gpu: int
    event: str
    traceparent: str
    def __init__(self, at: _Optional[float] = ..., text: _Optional[str] = ..., xid: _Optional[int] = ..., pci: _Optional[str] = ..., gpu: _Optional[int] = ..., event: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Disk(_message.Message):
    __slots__ = ("path", "used_bytes", "total_bytes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    path: str
    used_bytes: int
    total_bytes: int
    def __init__(self, path: _Optional[str] = ..., used_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class DiskLatency(_message.Message):
    __slots__ = ("path", "write_s")
    PATH_FIELD_NUMBER: _ClassVar[int]
    WRITE_S_FIELD_NUMBER: _ClassVar[int]
    path: str
    write_s: float
    def __init__(self, path: _Optional[str] = ..., write_s: _Optional[float] = ...) -> None: ...

class HostSample(_message.Message):
    __slots__ = ("at", "load1", "cpus", "memory_used_bytes", "memory_total_bytes", "disks", "disk_latency", "blocked", "clock_offset_s", "files_left", "files_max")
    AT_FIELD_NUMBER: _ClassVar[int]
    LOAD1_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISKS_FIELD_NUMBER: _ClassVar[int]
    DISK_LATENCY_FIELD_NUMBER: _ClassVar[int]
    BLOCKED_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_S_FIELD_NUMBER: _ClassVar[int]
    FILES_LEFT_FIELD_NUMBER: _ClassVar[int]
    FILES_MAX_FIELD_NUMBER: _ClassVar[int]
    at: float
    load1: float
    cpus: int
    memory_used_bytes: int
    memory_total_bytes: int
    disks: _containers.RepeatedCompositeFieldContainer[Disk]
    disk_latency: _containers.RepeatedCompositeFieldContainer[DiskLatency]
    blocked: int
    clock_offset_s: float
    files_left: int
    files_max: int
    def __init__(self, at: _Optional[float] = ..., load1: _Optional[float] = ..., cpus: _Optional[int] = ..., memory_used_bytes: _Optional[int] = ..., memory_total_bytes: _Optional[int] = ..., disks: _Optional[_Iterable[_Union[Disk, _Mapping]]] = ..., disk_latency: _Optional[_Iterable[_Union[DiskLatency, _Mapping]]] = ..., blocked: _Optional[int] = ..., clock_offset_s: _Optional[float] = ..., files_left: _Optional[int] = ..., files_max: _Optional[int] = ...) -> None: ...

class GpuSample(_message.Message):
    __slots__ = ("at", "gpu", "uuid", "temperature_c", "power_w", "memory_used_bytes", "ecc_uncorrected", "recovery_action", "lost")
    AT_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_C_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ECC_UNCORRECTED_FIELD_NUMBER: _ClassVar[int]
    RECOVERY_ACTION_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    at: float
    gpu: _containers.RepeatedScalarFieldContainer[int]
    uuid: _containers.RepeatedScalarFieldContainer[str]
    temperature_c: _containers.RepeatedScalarFieldContainer[float]
    power_w: _containers.RepeatedScalarFieldContainer[float]
    memory_used_bytes: _containers.RepeatedScalarFieldContainer[int]
    ecc_uncorrected: _containers.RepeatedScalarFieldContainer[int]
    recovery_action: _containers.RepeatedScalarFieldContainer[int]
    lost: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, at: _Optional[float] = ..., gpu: _Optional[_Iterable[int]] = ..., uuid: _Optional[_Iterable[str]] = ..., temperature_c: _Optional[_Iterable[float]] = ..., power_w: _Optional[_Iterable[float]] = ..., memory_used_bytes: _Optional[_Iterable[int]] = ..., ecc_uncorrected: _Optional[_Iterable[int]] = ..., recovery_action: _Optional[_Iterable[int]] = ..., lost: _Optional[_Iterable[bool]] = ...) -> None: ...

class GpuHealth(_message.Message):
    __slots__ = ("at", "expected", "gpu", "uuid", "ecc_corrected", "ecc_uncorrected_ever", "remapped_rows", "remap_pending", "remap_failed", "nvlinks_up", "nvlinks_down", "nvlink_errors", "pcie_replays", "pcie_width", "pcie_width_max", "pcie_gen", "pcie_gen_max", "utilization", "thermal_slowdown_ns", "power_brake_ns", "margin_c", "fabric_state", "fabric_health", "rejected")
    AT_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    ECC_CORRECTED_FIELD_NUMBER: _ClassVar[int]
    ECC_UNCORRECTED_EVER_FIELD_NUMBER: _ClassVar[int]
    REMAPPED_ROWS_FIELD_NUMBER: _ClassVar[int]
    REMAP_PENDING_FIELD_NUMBER: _ClassVar[int]
    REMAP_FAILED_FIELD_NUMBER: _ClassVar[int]
    NVLINKS_UP_FIELD_NUMBER: _ClassVar[int]
    NVLINKS_DOWN_FIELD_NUMBER: _ClassVar[int]
    NVLINK_ERRORS_FIELD_NUMBER: _ClassVar[int]
    PCIE_REPLAYS_FIELD_NUMBER: _ClassVar[int]
    PCIE_WIDTH_FIELD_NUMBER: _ClassVar[int]
    PCIE_WIDTH_MAX_FIELD_NUMBER: _ClassVar[int]
    PCIE_GEN_FIELD_NUMBER: _ClassVar[int]
    PCIE_GEN_MAX_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    THERMAL_SLOWDOWN_NS_FIELD_NUMBER: _ClassVar[int]
    POWER_BRAKE_NS_FIELD_NUMBER: _ClassVar[int]
    MARGIN_C_FIELD_NUMBER: _ClassVar[int]
    FABRIC_STATE_FIELD_NUMBER: _ClassVar[int]
    FABRIC_HEALTH_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    at: float
    expected: int
    gpu: _containers.RepeatedScalarFieldContainer[int]
    uuid: _containers.RepeatedScalarFieldContainer[str]
    ecc_corrected: _containers.RepeatedScalarFieldContainer[int]
    ecc_uncorrected_ever: _containers.RepeatedScalarFieldContainer[int]
    remapped_rows: _containers.RepeatedScalarFieldContainer[int]
    remap_pending: _containers.RepeatedScalarFieldContainer[int]
    remap_failed: _containers.RepeatedScalarFieldContainer[int]
    nvlinks_up: _containers.RepeatedScalarFieldContainer[int]
    nvlinks_down: _containers.RepeatedScalarFieldContainer[int]
    nvlink_errors: _containers.RepeatedScalarFieldContainer[int]
    pcie_replays: _containers.RepeatedScalarFieldContainer[int]
    pcie_width: _containers.RepeatedScalarFieldContainer[int]
    pcie_width_max: _containers.RepeatedScalarFieldContainer[int]
    pcie_gen: _containers.RepeatedScalarFieldContainer[int]
    pcie_gen_max: _containers.RepeatedScalarFieldContainer[int]
    utilization: _containers.RepeatedScalarFieldContainer[int]
    thermal_slowdown_ns: _containers.RepeatedScalarFieldContainer[int]
    power_brake_ns: _containers.RepeatedScalarFieldContainer[int]
    margin_c: _containers.RepeatedScalarFieldContainer[float]
    fabric_state: _containers.RepeatedScalarFieldContainer[int]
    fabric_health: _containers.RepeatedScalarFieldContainer[int]
    rejected: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, at: _Optional[float] = ..., expected: _Optional[int] = ..., gpu: _Optional[_Iterable[int]] = ..., uuid: _Optional[_Iterable[str]] = ..., ecc_corrected: _Optional[_Iterable[int]] = ..., ecc_uncorrected_ever: _Optional[_Iterable[int]] = ..., remapped_rows: _Optional[_Iterable[int]] = ..., remap_pending: _Optional[_Iterable[int]] = ..., remap_failed: _Optional[_Iterable[int]] = ..., nvlinks_up: _Optional[_Iterable[int]] = ..., nvlinks_down: _Optional[_Iterable[int]] = ..., nvlink_errors: _Optional[_Iterable[int]] = ..., pcie_replays: _Optional[_Iterable[int]] = ..., pcie_width: _Optional[_Iterable[int]] = ..., pcie_width_max: _Optional[_Iterable[int]] = ..., pcie_gen: _Optional[_Iterable[int]] = ..., pcie_gen_max: _Optional[_Iterable[int]] = ..., utilization: _Optional[_Iterable[int]] = ..., thermal_slowdown_ns: _Optional[_Iterable[int]] = ..., power_brake_ns: _Optional[_Iterable[int]] = ..., margin_c: _Optional[_Iterable[float]] = ..., fabric_state: _Optional[_Iterable[int]] = ..., fabric_health: _Optional[_Iterable[int]] = ..., rejected: _Optional[_Iterable[int]] = ...) -> None: ...

class NicSample(_message.Message):
    __slots__ = ("at", "device", "port", "link_layer", "state", "phys_state", "symbol_errors", "link_downed", "link_recoveries", "buffer_overruns", "integrity_errors", "rnr_retries", "slow_restarts")
    AT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    LINK_LAYER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PHYS_STATE_FIELD_NUMBER: _ClassVar[int]
    SYMBOL_ERRORS_FIELD_NUMBER: _ClassVar[int]
    LINK_DOWNED_FIELD_NUMBER: _ClassVar[int]
    LINK_RECOVERIES_FIELD_NUMBER: _ClassVar[int]
    BUFFER_OVERRUNS_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_ERRORS_FIELD_NUMBER: _ClassVar[int]
    RNR_RETRIES_FIELD_NUMBER: _ClassVar[int]
    SLOW_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    at: float
    device: _containers.RepeatedScalarFieldContainer[str]
    port: _containers.RepeatedScalarFieldContainer[int]
    link_layer: _containers.RepeatedScalarFieldContainer[str]
    state: _containers.RepeatedScalarFieldContainer[str]
    phys_state: _containers.RepeatedScalarFieldContainer[str]
    symbol_errors: _containers.RepeatedScalarFieldContainer[int]
    link_downed: _containers.RepeatedScalarFieldContainer[int]
    link_recoveries: _containers.RepeatedScalarFieldContainer[int]
    buffer_overruns: _containers.RepeatedScalarFieldContainer[int]
    integrity_errors: _containers.RepeatedScalarFieldContainer[int]
    rnr_retries: _containers.RepeatedScalarFieldContainer[int]
    slow_restarts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, at: _Optional[float] = ..., device: _Optional[_Iterable[str]] = ..., port: _Optional[_Iterable[int]] = ..., link_layer: _Optional[_Iterable[str]] = ..., state: _Optional[_Iterable[str]] = ..., phys_state: _Optional[_Iterable[str]] = ..., symbol_errors: _Optional[_Iterable[int]] = ..., link_downed: _Optional[_Iterable[int]] = ..., link_recoveries: _Optional[_Iterable[int]] = ..., buffer_overruns: _Optional[_Iterable[int]] = ..., integrity_errors: _Optional[_Iterable[int]] = ..., rnr_retries: _Optional[_Iterable[int]] = ..., slow_restarts: _Optional[_Iterable[int]] = ...) -> None: ...

class MaintenanceNotice(_message.Message):
    __slots__ = ("at", "source", "event", "starts_at", "incarnation")
    AT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    STARTS_AT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    at: float
    source: str
    event: str
    starts_at: float
    incarnation: str
    def __init__(self, at: _Optional[float] = ..., source: _Optional[str] = ..., event: _Optional[str] = ..., starts_at: _Optional[float] = ..., incarnation: _Optional[str] = ...) -> None: ...

class CheckpointTrouble(_message.Message):
    __slots__ = ("at", "job", "kind", "place", "reason", "rank")
    AT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    at: float
    job: str
    kind: str
    place: str
    reason: str
    rank: int
    def __init__(self, at: _Optional[float] = ..., job: _Optional[str] = ..., kind: _Optional[str] = ..., place: _Optional[str] = ..., reason: _Optional[str] = ..., rank: _Optional[int] = ...) -> None: ...

class CollectorSilent(_message.Message):
    __slots__ = ("at", "collector", "misses", "reason")
    AT_FIELD_NUMBER: _ClassVar[int]
    COLLECTOR_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    at: float
    collector: str
    misses: int
    reason: str
    def __init__(self, at: _Optional[float] = ..., collector: _Optional[str] = ..., misses: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Measurements(_message.Message):
    __slots__ = ("at", "source", "name", "value")
    AT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    at: float
    source: str
    name: _containers.RepeatedScalarFieldContainer[str]
    value: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, at: _Optional[float] = ..., source: _Optional[str] = ..., name: _Optional[_Iterable[str]] = ..., value: _Optional[_Iterable[float]] = ...) -> None: ...

class HealthChecks(_message.Message):
    __slots__ = ("at", "tool", "check", "gpu", "verdict", "reason")
    AT_FIELD_NUMBER: _ClassVar[int]
    TOOL_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    at: float
    tool: str
    check: _containers.RepeatedScalarFieldContainer[str]
    gpu: _containers.RepeatedScalarFieldContainer[int]
    verdict: _containers.RepeatedScalarFieldContainer[Verdict]
    reason: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, at: _Optional[float] = ..., tool: _Optional[str] = ..., check: _Optional[_Iterable[str]] = ..., gpu: _Optional[_Iterable[int]] = ..., verdict: _Optional[_Iterable[_Union[Verdict, str]]] = ..., reason: _Optional[_Iterable[str]] = ...) -> None: ...
