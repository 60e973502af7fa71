from holdfast.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AgentMessage(_message.Message):
    __slots__ = ("seq", "traceparent", "hello", "order_done", "ranks_stepping", "ranks_finished", "inventory", "beat", "tested", "workers_changed", "log_read", "gpus_read", "ranks_read", "errors_read")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ORDER_DONE_FIELD_NUMBER: _ClassVar[int]
    RANKS_STEPPING_FIELD_NUMBER: _ClassVar[int]
    RANKS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_FIELD_NUMBER: _ClassVar[int]
    BEAT_FIELD_NUMBER: _ClassVar[int]
    TESTED_FIELD_NUMBER: _ClassVar[int]
    WORKERS_CHANGED_FIELD_NUMBER: _ClassVar[int]
    LOG_READ_FIELD_NUMBER: _ClassVar[int]
    GPUS_READ_FIELD_NUMBER: _ClassVar[int]
    RANKS_READ_FIELD_NUMBER: _ClassVar[int]
    ERRORS_READ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    traceparent: str
    hello: Hello
    order_done: OrderDone
    ranks_stepping: RanksStepping
    ranks_finished: RanksFinished
    inventory: Inventory
    beat: Beat
    tested: Tested
    workers_changed: WorkersChanged
    log_read: LogRead
    gpus_read: GpusRead
    ranks_read: RanksRead
    errors_read: ErrorsRead
    def __init__(self, seq: _Optional[int] = ..., traceparent: _Optional[str] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., order_done: _Optional[_Union[OrderDone, _Mapping]] = ..., ranks_stepping: _Optional[_Union[RanksStepping, _Mapping]] = ..., ranks_finished: _Optional[_Union[RanksFinished, _Mapping]] = ..., inventory: _Optional[_Union[Inventory, _Mapping]] = ..., beat: _Optional[_Union[Beat, _Mapping]] = ..., tested: _Optional[_Union[Tested, _Mapping]] = ..., workers_changed: _Optional[_Union[WorkersChanged, _Mapping]] = ..., log_read: _Optional[_Union[LogRead, _Mapping]] = ..., gpus_read: _Optional[_Union[GpusRead, _Mapping]] = ..., ranks_read: _Optional[_Union[RanksRead, _Mapping]] = ..., errors_read: _Optional[_Union[ErrorsRead, _Mapping]] = ...) -> None: ...

class Reported(_message.Message):
    __slots__ = ("at", "node", "incarnation", "session", "message")
    AT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    at: float
    node: str
    incarnation: str
    session: int
    message: bytes
    def __init__(self, at: _Optional[float] = ..., node: _Optional[str] = ..., incarnation: _Optional[str] = ..., session: _Optional[int] = ..., message: _Optional[bytes] = ...) -> None: ...

class Reports(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[Reported]
    def __init__(self, reports: _Optional[_Iterable[_Union[Reported, _Mapping]]] = ...) -> None: ...

class SupervisorMessage(_message.Message):
    __slots__ = ("welcome", "command", "ack", "saved_by_all", "heard", "read_log", "read_gpus", "read_ranks", "read_errors", "first_steps_recorded", "peers")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    SAVED_BY_ALL_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    READ_LOG_FIELD_NUMBER: _ClassVar[int]
    READ_GPUS_FIELD_NUMBER: _ClassVar[int]
    READ_RANKS_FIELD_NUMBER: _ClassVar[int]
    READ_ERRORS_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEPS_RECORDED_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    command: Command
    ack: ReportAck
    saved_by_all: SavedByAll
    heard: Heard
    read_log: ReadLog
    read_gpus: ReadGpus
    read_ranks: ReadRanks
    read_errors: ReadErrors
    first_steps_recorded: FirstStepsRecorded
    peers: Peers
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., command: _Optional[_Union[Command, _Mapping]] = ..., ack: _Optional[_Union[ReportAck, _Mapping]] = ..., saved_by_all: _Optional[_Union[SavedByAll, _Mapping]] = ..., heard: _Optional[_Union[Heard, _Mapping]] = ..., read_log: _Optional[_Union[ReadLog, _Mapping]] = ..., read_gpus: _Optional[_Union[ReadGpus, _Mapping]] = ..., read_ranks: _Optional[_Union[ReadRanks, _Mapping]] = ..., read_errors: _Optional[_Union[ReadErrors, _Mapping]] = ..., first_steps_recorded: _Optional[_Union[FirstStepsRecorded, _Mapping]] = ..., peers: _Optional[_Union[Peers, _Mapping]] = ...) -> None: ...

class ReadLog(_message.Message):
    __slots__ = ("id", "job", "generation", "rank", "offset", "bytes_max")
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    id: int
    job: str
    generation: int
    rank: int
    offset: int
    bytes_max: int
    def __init__(self, id: _Optional[int] = ..., job: _Optional[str] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., offset: _Optional[int] = ..., bytes_max: _Optional[int] = ...) -> None: ...

class LogRead(_message.Message):
    __slots__ = ("id", "problem", "offset", "size", "data")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    id: int
    problem: str
    offset: int
    size: int
    data: bytes
    def __init__(self, id: _Optional[int] = ..., problem: _Optional[str] = ..., offset: _Optional[int] = ..., size: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class ReadGpus(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class GpusRead(_message.Message):
    __slots__ = ("id", "gpus")
    ID_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    id: int
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    def __init__(self, id: _Optional[int] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ...) -> None: ...

class Gpu(_message.Message):
    __slots__ = ("gpu", "uuid", "at", "lost", "temperature_c", "margin_c", "power_w", "memory_used", "utilization", "ecc_corrected", "ecc_uncorrected", "ecc_uncorrected_ever", "remapped_rows", "remap_pending", "remap_failed", "nvlinks_up", "nvlinks_down", "nvlink_errors", "pcie_replays", "pcie_width", "pcie_width_max", "pcie_gen", "pcie_gen_max")
    GPU_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_C_FIELD_NUMBER: _ClassVar[int]
    MARGIN_C_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    MEMORY_USED_FIELD_NUMBER: _ClassVar[int]
    UTILIZATION_FIELD_NUMBER: _ClassVar[int]
    ECC_CORRECTED_FIELD_NUMBER: _ClassVar[int]
    ECC_UNCORRECTED_FIELD_NUMBER: _ClassVar[int]
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
    gpu: int
    uuid: str
    at: float
    lost: bool
    temperature_c: float
    margin_c: float
    power_w: float
    memory_used: int
    utilization: int
    ecc_corrected: int
    ecc_uncorrected: int
    ecc_uncorrected_ever: int
    remapped_rows: int
    remap_pending: bool
    remap_failed: bool
    nvlinks_up: int
    nvlinks_down: int
    nvlink_errors: int
    pcie_replays: int
    pcie_width: int
    pcie_width_max: int
    pcie_gen: int
    pcie_gen_max: int
    def __init__(self, gpu: _Optional[int] = ..., uuid: _Optional[str] = ..., at: _Optional[float] = ..., lost: bool = ..., temperature_c: _Optional[float] = ..., margin_c: _Optional[float] = ..., power_w: _Optional[float] = ..., memory_used: _Optional[int] = ..., utilization: _Optional[int] = ..., ecc_corrected: _Optional[int] = ..., ecc_uncorrected: _Optional[int] = ..., ecc_uncorrected_ever: _Optional[int] = ..., remapped_rows: _Optional[int] = ..., remap_pending: bool = ..., remap_failed: bool = ..., nvlinks_up: _Optional[int] = ..., nvlinks_down: _Optional[int] = ..., nvlink_errors: _Optional[int] = ..., pcie_replays: _Optional[int] = ..., pcie_width: _Optional[int] = ..., pcie_width_max: _Optional[int] = ..., pcie_gen: _Optional[int] = ..., pcie_gen_max: _Optional[int] = ...) -> None: ...

class ReadRanks(_message.Message):
    __slots__ = ("id", "job")
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    id: int
    job: str
    def __init__(self, id: _Optional[int] = ..., job: _Optional[str] = ...) -> None: ...

class RanksRead(_message.Message):
    __slots__ = ("id", "generation", "ranks", "step_s", "wait_s", "temperature_c")
    ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_C_FIELD_NUMBER: _ClassVar[int]
    id: int
    generation: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    step_s: _containers.RepeatedScalarFieldContainer[float]
    wait_s: _containers.RepeatedScalarFieldContainer[float]
    temperature_c: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, id: _Optional[int] = ..., generation: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., step_s: _Optional[_Iterable[float]] = ..., wait_s: _Optional[_Iterable[float]] = ..., temperature_c: _Optional[_Iterable[float]] = ...) -> None: ...

class ReadErrors(_message.Message):
    __slots__ = ("id", "job", "generation")
    ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    id: int
    job: str
    generation: int
    def __init__(self, id: _Optional[int] = ..., job: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class ErrorsRead(_message.Message):
    __slots__ = ("id", "problem", "errors")
    ID_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    id: int
    problem: str
    errors: _containers.RepeatedCompositeFieldContainer[RaisedError]
    def __init__(self, id: _Optional[int] = ..., problem: _Optional[str] = ..., errors: _Optional[_Iterable[_Union[RaisedError, _Mapping]]] = ...) -> None: ...

class RaisedError(_message.Message):
    __slots__ = ("generation", "rank", "at", "type", "message", "frames")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    rank: int
    at: float
    type: str
    message: str
    frames: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, generation: _Optional[int] = ..., rank: _Optional[int] = ..., at: _Optional[float] = ..., type: _Optional[str] = ..., message: _Optional[str] = ..., frames: _Optional[_Iterable[str]] = ...) -> None: ...

class Beat(_message.Message):
    __slots__ = ("at", "workers_version", "steps", "started", "telemetry_cut_s", "first_steps", "diagnostics_version", "replicator_version")
    AT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_VERSION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_CUT_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEPS_FIELD_NUMBER: _ClassVar[int]
    DIAGNOSTICS_VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLICATOR_VERSION_FIELD_NUMBER: _ClassVar[int]
    at: float
    workers_version: int
    steps: _containers.RepeatedCompositeFieldContainer[StepReached]
    started: _containers.RepeatedCompositeFieldContainer[RanksStarted]
    telemetry_cut_s: float
    first_steps: _containers.RepeatedCompositeFieldContainer[RanksStepping]
    diagnostics_version: str
    replicator_version: str
    def __init__(self, at: _Optional[float] = ..., workers_version: _Optional[int] = ..., steps: _Optional[_Iterable[_Union[StepReached, _Mapping]]] = ..., started: _Optional[_Iterable[_Union[RanksStarted, _Mapping]]] = ..., telemetry_cut_s: _Optional[float] = ..., first_steps: _Optional[_Iterable[_Union[RanksStepping, _Mapping]]] = ..., diagnostics_version: _Optional[str] = ..., replicator_version: _Optional[str] = ...) -> None: ...

class FirstStepsRecorded(_message.Message):
    __slots__ = ("job", "generation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class RanksStarted(_message.Message):
    __slots__ = ("job", "generation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class StepReached(_message.Message):
    __slots__ = ("job", "generation", "step", "observed", "observed_step_s")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_STEP_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    step: int
    observed: int
    observed_step_s: float
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., observed: _Optional[int] = ..., observed_step_s: _Optional[float] = ...) -> None: ...

class ReportAck(_message.Message):
    __slots__ = ("seq",)
    SEQ_FIELD_NUMBER: _ClassVar[int]
    seq: int
    def __init__(self, seq: _Optional[int] = ...) -> None: ...

class SavedByAll(_message.Message):
    __slots__ = ("epoch", "job", "attempt", "step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    job: str
    attempt: int
    step: int
    def __init__(self, epoch: _Optional[int] = ..., job: _Optional[str] = ..., attempt: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("epoch", "supervisor", "protocol_version", "diagnostics", "peers", "inventory_differences", "answers_beats", "columns", "workers_in_answers", "starts_in_beats", "shard_runs", "first_steps_in_beats", "shard_shapes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SUPERVISOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DIAGNOSTICS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    INVENTORY_DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_BEATS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_IN_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    STARTS_IN_BEATS_FIELD_NUMBER: _ClassVar[int]
    SHARD_RUNS_FIELD_NUMBER: _ClassVar[int]
    FIRST_STEPS_IN_BEATS_FIELD_NUMBER: _ClassVar[int]
    SHARD_SHAPES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    supervisor: str
    protocol_version: int
    diagnostics: _containers.RepeatedScalarFieldContainer[str]
    peers: _containers.RepeatedScalarFieldContainer[str]
    inventory_differences: bool
    answers_beats: bool
    columns: bool
    workers_in_answers: bool
    starts_in_beats: bool
    shard_runs: bool
    first_steps_in_beats: bool
    shard_shapes: bool
    def __init__(self, epoch: _Optional[int] = ..., supervisor: _Optional[str] = ..., protocol_version: _Optional[int] = ..., diagnostics: _Optional[_Iterable[str]] = ..., peers: _Optional[_Iterable[str]] = ..., inventory_differences: bool = ..., answers_beats: bool = ..., columns: bool = ..., workers_in_answers: bool = ..., starts_in_beats: bool = ..., shard_runs: bool = ..., first_steps_in_beats: bool = ..., shard_shapes: bool = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("endpoints",)
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, endpoints: _Optional[_Iterable[str]] = ...) -> None: ...

class Heard(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Command(_message.Message):
    __slots__ = ("epoch", "command_id", "traceparent", "warm", "prepare", "start", "stop", "checkpoint_now", "set_interval", "prune", "reset_gpu", "inject", "reboot_node", "restart_agent", "check_link")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    WARM_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_NOW_FIELD_NUMBER: _ClassVar[int]
    SET_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    PRUNE_FIELD_NUMBER: _ClassVar[int]
    RESET_GPU_FIELD_NUMBER: _ClassVar[int]
    INJECT_FIELD_NUMBER: _ClassVar[int]
    REBOOT_NODE_FIELD_NUMBER: _ClassVar[int]
    RESTART_AGENT_FIELD_NUMBER: _ClassVar[int]
    CHECK_LINK_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    command_id: str
    traceparent: str
    warm: Warm
    prepare: Prepare
    start: Start
    stop: Stop
    checkpoint_now: CheckpointNow
    set_interval: SetInterval
    prune: Prune
    reset_gpu: ResetGpu
    inject: Inject
    reboot_node: RebootNode
    restart_agent: RestartAgent
    check_link: CheckLink
    def __init__(self, epoch: _Optional[int] = ..., command_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., warm: _Optional[_Union[Warm, _Mapping]] = ..., prepare: _Optional[_Union[Prepare, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., checkpoint_now: _Optional[_Union[CheckpointNow, _Mapping]] = ..., set_interval: _Optional[_Union[SetInterval, _Mapping]] = ..., prune: _Optional[_Union[Prune, _Mapping]] = ..., reset_gpu: _Optional[_Union[ResetGpu, _Mapping]] = ..., inject: _Optional[_Union[Inject, _Mapping]] = ..., reboot_node: _Optional[_Union[RebootNode, _Mapping]] = ..., restart_agent: _Optional[_Union[RestartAgent, _Mapping]] = ..., check_link: _Optional[_Union[CheckLink, _Mapping]] = ...) -> None: ...

class LaunchSpec(_message.Message):
    __slots__ = ("script", "args", "cwd", "env", "preload", "module", "command", "env_from")
    SCRIPT_FIELD_NUMBER: _ClassVar[int]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    CWD_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    PRELOAD_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    ENV_FROM_FIELD_NUMBER: _ClassVar[int]
    script: str
    args: _containers.RepeatedScalarFieldContainer[str]
    cwd: str
    env: _containers.RepeatedCompositeFieldContainer[EnvVar]
    preload: _containers.RepeatedScalarFieldContainer[str]
    module: str
    command: str
    env_from: _containers.RepeatedCompositeFieldContainer[EnvSource]
    def __init__(self, script: _Optional[str] = ..., args: _Optional[_Iterable[str]] = ..., cwd: _Optional[str] = ..., env: _Optional[_Iterable[_Union[EnvVar, _Mapping]]] = ..., preload: _Optional[_Iterable[str]] = ..., module: _Optional[str] = ..., command: _Optional[str] = ..., env_from: _Optional[_Iterable[_Union[EnvSource, _Mapping]]] = ...) -> None: ...

class EnvSource(_message.Message):
    __slots__ = ("name", "file", "command")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    name: str
    file: str
    command: str
    def __init__(self, name: _Optional[str] = ..., file: _Optional[str] = ..., command: _Optional[str] = ...) -> None: ...

class EnvVar(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class CheckpointSpec(_message.Message):
    __slots__ = ("interval_steps", "keep", "interval_min_s", "interval_max_s", "store", "store_interval_s", "store_keep")
    INTERVAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MIN_S_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_MAX_S_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    STORE_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    STORE_KEEP_FIELD_NUMBER: _ClassVar[int]
    interval_steps: int
    keep: int
    interval_min_s: float
    interval_max_s: float
    store: str
    store_interval_s: float
    store_keep: int
    def __init__(self, interval_steps: _Optional[int] = ..., keep: _Optional[int] = ..., interval_min_s: _Optional[float] = ..., interval_max_s: _Optional[float] = ..., store: _Optional[str] = ..., store_interval_s: _Optional[float] = ..., store_keep: _Optional[int] = ...) -> None: ...

class Placement(_message.Message):
    __slots__ = ("slot", "node", "first_rank", "nproc")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    NPROC_FIELD_NUMBER: _ClassVar[int]
    slot: int
    node: str
    first_rank: int
    nproc: int
    def __init__(self, slot: _Optional[int] = ..., node: _Optional[str] = ..., first_rank: _Optional[int] = ..., nproc: _Optional[int] = ...) -> None: ...

class Warm(_message.Message):
    __slots__ = ("job", "launch")
    JOB_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    job: str
    launch: LaunchSpec
    def __init__(self, job: _Optional[str] = ..., launch: _Optional[_Union[LaunchSpec, _Mapping]] = ...) -> None: ...

class Prepare(_message.Message):
    __slots__ = ("job", "generation", "attempt", "mesh", "placement", "nnodes", "launch", "checkpoint", "hang", "restore_step", "restore", "peers", "token", "restore_mesh", "checks", "self_test", "first_attempt", "restore_runs", "chaos", "suspect_test_s", "warning_settles_s", "first_message_s")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_FIELD_NUMBER: _ClassVar[int]
    NNODES_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    HANG_FIELD_NUMBER: _ClassVar[int]
    RESTORE_STEP_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESTORE_MESH_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    SELF_TEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESTORE_RUNS_FIELD_NUMBER: _ClassVar[int]
    CHAOS_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_TEST_S_FIELD_NUMBER: _ClassVar[int]
    WARNING_SETTLES_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_MESSAGE_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    attempt: int
    mesh: _types_pb2.Mesh
    placement: Placement
    nnodes: int
    launch: LaunchSpec
    checkpoint: CheckpointSpec
    hang: _types_pb2.HangSpec
    restore_step: int
    restore: _containers.RepeatedCompositeFieldContainer[_types_pb2.RankRestore]
    peers: _containers.RepeatedCompositeFieldContainer[_types_pb2.ShardSource]
    token: str
    restore_mesh: _types_pb2.Mesh
    checks: _types_pb2.ChecksSpec
    self_test: bool
    first_attempt: int
    restore_runs: _containers.RepeatedCompositeFieldContainer[_types_pb2.RestoreRun]
    chaos: bool
    suspect_test_s: float
    warning_settles_s: float
    first_message_s: float
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., attempt: _Optional[int] = ..., mesh: _Optional[_Union[_types_pb2.Mesh, _Mapping]] = ..., placement: _Optional[_Union[Placement, _Mapping]] = ..., nnodes: _Optional[int] = ..., launch: _Optional[_Union[LaunchSpec, _Mapping]] = ..., checkpoint: _Optional[_Union[CheckpointSpec, _Mapping]] = ..., hang: _Optional[_Union[_types_pb2.HangSpec, _Mapping]] = ..., restore_step: _Optional[int] = ..., restore: _Optional[_Iterable[_Union[_types_pb2.RankRestore, _Mapping]]] = ..., peers: _Optional[_Iterable[_Union[_types_pb2.ShardSource, _Mapping]]] = ..., token: _Optional[str] = ..., restore_mesh: _Optional[_Union[_types_pb2.Mesh, _Mapping]] = ..., checks: _Optional[_Union[_types_pb2.ChecksSpec, _Mapping]] = ..., self_test: bool = ..., first_attempt: _Optional[int] = ..., restore_runs: _Optional[_Iterable[_Union[_types_pb2.RestoreRun, _Mapping]]] = ..., chaos: bool = ..., suspect_test_s: _Optional[float] = ..., warning_settles_s: _Optional[float] = ..., first_message_s: _Optional[float] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("job", "generation", "master")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    master: str
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., master: _Optional[str] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ("job", "generation", "grace_s", "forget", "ended")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    GRACE_S_FIELD_NUMBER: _ClassVar[int]
    FORGET_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    grace_s: float
    forget: bool
    ended: bool
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., grace_s: _Optional[float] = ..., forget: bool = ..., ended: bool = ...) -> None: ...

class Prune(_message.Message):
    __slots__ = ("job", "steps")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    job: str
    steps: _containers.RepeatedCompositeFieldContainer[_types_pb2.SavedStep]
    def __init__(self, job: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[_types_pb2.SavedStep, _Mapping]]] = ...) -> None: ...

class ResetGpu(_message.Message):
    __slots__ = ("job", "gpus", "timeout_s")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    gpus: _containers.RepeatedScalarFieldContainer[int]
    timeout_s: float
    def __init__(self, job: _Optional[str] = ..., gpus: _Optional[_Iterable[int]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class RestartAgent(_message.Message):
    __slots__ = ("cause", "job")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    cause: str
    job: str
    def __init__(self, cause: _Optional[str] = ..., job: _Optional[str] = ...) -> None: ...

class CheckLink(_message.Message):
    __slots__ = ("partner", "token", "limits", "endpoint", "for_s", "job")
    PARTNER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    partner: str
    token: str
    limits: _types_pb2.LinkLimits
    endpoint: str
    for_s: float
    job: str
    def __init__(self, partner: _Optional[str] = ..., token: _Optional[str] = ..., limits: _Optional[_Union[_types_pb2.LinkLimits, _Mapping]] = ..., endpoint: _Optional[str] = ..., for_s: _Optional[float] = ..., job: _Optional[str] = ...) -> None: ...

class RebootNode(_message.Message):
    __slots__ = ("job", "cause", "timeout_s")
    JOB_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    cause: str
    timeout_s: float
    def __init__(self, job: _Optional[str] = ..., cause: _Optional[str] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class Inject(_message.Message):
    __slots__ = ("job", "generation", "kind", "rank", "for_s", "xid", "not_after", "operation", "loss_percent", "offset_s")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    XID_FIELD_NUMBER: _ClassVar[int]
    NOT_AFTER_FIELD_NUMBER: _ClassVar[int]
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    LOSS_PERCENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    kind: str
    rank: int
    for_s: float
    xid: int
    not_after: float
    operation: str
    loss_percent: float
    offset_s: float
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., kind: _Optional[str] = ..., rank: _Optional[int] = ..., for_s: _Optional[float] = ..., xid: _Optional[int] = ..., not_after: _Optional[float] = ..., operation: _Optional[str] = ..., loss_percent: _Optional[float] = ..., offset_s: _Optional[float] = ...) -> None: ...

class CheckpointNow(_message.Message):
    __slots__ = ("job", "generation", "at_step", "far", "leaving", "stage")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    AT_STEP_FIELD_NUMBER: _ClassVar[int]
    FAR_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    at_step: int
    far: bool
    leaving: str
    stage: str
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., at_step: _Optional[int] = ..., far: bool = ..., leaving: _Optional[str] = ..., stage: _Optional[str] = ...) -> None: ...

class SetInterval(_message.Message):
    __slots__ = ("job", "generation", "from_step", "interval_steps")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    INTERVAL_STEPS_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    from_step: int
    interval_steps: int
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., from_step: _Optional[int] = ..., interval_steps: _Optional[int] = ...) -> None: ...

class RunningWorker(_message.Message):
    __slots__ = ("job", "generation", "rank", "pid", "since")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    rank: int
    pid: int
    since: float
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., pid: _Optional[int] = ..., since: _Optional[float] = ...) -> None: ...

class WorkerColumns(_message.Message):
    __slots__ = ("ranks", "jobs", "generations", "pids", "since")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    jobs: _containers.RepeatedScalarFieldContainer[str]
    generations: _containers.RepeatedScalarFieldContainer[int]
    pids: _containers.RepeatedScalarFieldContainer[int]
    since: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., jobs: _Optional[_Iterable[str]] = ..., generations: _Optional[_Iterable[int]] = ..., pids: _Optional[_Iterable[int]] = ..., since: _Optional[_Iterable[float]] = ...) -> None: ...

class WorkerEnded(_message.Message):
    __slots__ = ("job", "generation", "rank", "exit_code", "signal", "ago_s")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    AGO_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    rank: int
    exit_code: int
    signal: int
    ago_s: float
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., exit_code: _Optional[int] = ..., signal: _Optional[int] = ..., ago_s: _Optional[float] = ...) -> None: ...

class Template(_message.Message):
    __slots__ = ("jobs", "ready", "failure")
    JOBS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedScalarFieldContainer[str]
    ready: bool
    failure: str
    def __init__(self, jobs: _Optional[_Iterable[str]] = ..., ready: bool = ..., failure: _Optional[str] = ...) -> None: ...

class WorkersChanged(_message.Message):
    __slots__ = ("version", "workers", "ended", "template", "columns")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    version: int
    workers: _containers.RepeatedCompositeFieldContainer[RunningWorker]
    ended: _containers.RepeatedCompositeFieldContainer[WorkerEnded]
    template: Template
    columns: WorkerColumns
    def __init__(self, version: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[RunningWorker, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[WorkerEnded, _Mapping]]] = ..., template: _Optional[_Union[Template, _Mapping]] = ..., columns: _Optional[_Union[WorkerColumns, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("node", "incarnation", "hostname", "address", "zone", "capacity", "replicator_endpoint", "agent_pid", "directory", "kernel_log", "version", "protocol_version", "running", "preflight", "workers_version", "ended", "disk_dir", "template", "restore_runs", "resets_gpus", "boot_id", "reboots", "machine_id", "restarts", "tests_links", "pool", "announced", "agrees_on_saves")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOSTNAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    REPLICATOR_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    AGENT_PID_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    KERNEL_LOG_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    PREFLIGHT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_VERSION_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    DISK_DIR_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    RESTORE_RUNS_FIELD_NUMBER: _ClassVar[int]
    RESETS_GPUS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    REBOOTS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_ID_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    TESTS_LINKS_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCED_FIELD_NUMBER: _ClassVar[int]
    AGREES_ON_SAVES_FIELD_NUMBER: _ClassVar[int]
    node: str
    incarnation: str
    hostname: str
    address: str
    zone: str
    capacity: int
    replicator_endpoint: str
    agent_pid: int
    directory: str
    kernel_log: str
    version: str
    protocol_version: int
    running: _containers.RepeatedCompositeFieldContainer[RunningWorker]
    preflight: _types_pb2.Preflight
    workers_version: int
    ended: _containers.RepeatedCompositeFieldContainer[WorkerEnded]
    disk_dir: str
    template: Template
    restore_runs: bool
    resets_gpus: bool
    boot_id: str
    reboots: bool
    machine_id: str
    restarts: bool
    tests_links: bool
    pool: str
    announced: Announced
    agrees_on_saves: bool
    def __init__(self, node: _Optional[str] = ..., incarnation: _Optional[str] = ..., hostname: _Optional[str] = ..., address: _Optional[str] = ..., zone: _Optional[str] = ..., capacity: _Optional[int] = ..., replicator_endpoint: _Optional[str] = ..., agent_pid: _Optional[int] = ..., directory: _Optional[str] = ..., kernel_log: _Optional[str] = ..., version: _Optional[str] = ..., protocol_version: _Optional[int] = ..., running: _Optional[_Iterable[_Union[RunningWorker, _Mapping]]] = ..., preflight: _Optional[_Union[_types_pb2.Preflight, _Mapping]] = ..., workers_version: _Optional[int] = ..., ended: _Optional[_Iterable[_Union[WorkerEnded, _Mapping]]] = ..., disk_dir: _Optional[str] = ..., template: _Optional[_Union[Template, _Mapping]] = ..., restore_runs: bool = ..., resets_gpus: bool = ..., boot_id: _Optional[str] = ..., reboots: bool = ..., machine_id: _Optional[str] = ..., restarts: bool = ..., tests_links: bool = ..., pool: _Optional[str] = ..., announced: _Optional[_Union[Announced, _Mapping]] = ..., agrees_on_saves: bool = ...) -> None: ...

class Announced(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, jobs: _Optional[_Iterable[str]] = ...) -> None: ...

class PhaseTime(_message.Message):
    __slots__ = ("name", "seconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Restored(_message.Message):
    __slots__ = ("source", "shards")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    source: str
    shards: int
    def __init__(self, source: _Optional[str] = ..., shards: _Optional[int] = ...) -> None: ...

class RestoredBytes(_message.Message):
    __slots__ = ("source", "bytes")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    source: str
    bytes: int
    def __init__(self, source: _Optional[str] = ..., bytes: _Optional[int] = ...) -> None: ...

class OrderDone(_message.Message):
    __slots__ = ("command_id", "ok", "reason", "master", "at", "phases", "workers", "unrestorable", "restored", "restored_bytes", "columns", "workers_version", "tested", "link")
    COMMAND_ID_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MASTER_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    UNRESTORABLE_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    RESTORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_VERSION_FIELD_NUMBER: _ClassVar[int]
    TESTED_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    command_id: str
    ok: bool
    reason: str
    master: str
    at: float
    phases: _containers.RepeatedCompositeFieldContainer[PhaseTime]
    workers: _containers.RepeatedCompositeFieldContainer[RunningWorker]
    unrestorable: bool
    restored: _containers.RepeatedCompositeFieldContainer[Restored]
    restored_bytes: _containers.RepeatedCompositeFieldContainer[RestoredBytes]
    columns: WorkerColumns
    workers_version: int
    tested: _types_pb2.Preflight
    link: _types_pb2.LinkMeasured
    def __init__(self, command_id: _Optional[str] = ..., ok: bool = ..., reason: _Optional[str] = ..., master: _Optional[str] = ..., at: _Optional[float] = ..., phases: _Optional[_Iterable[_Union[PhaseTime, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[RunningWorker, _Mapping]]] = ..., unrestorable: bool = ..., restored: _Optional[_Iterable[_Union[Restored, _Mapping]]] = ..., restored_bytes: _Optional[_Iterable[_Union[RestoredBytes, _Mapping]]] = ..., columns: _Optional[_Union[WorkerColumns, _Mapping]] = ..., workers_version: _Optional[int] = ..., tested: _Optional[_Union[_types_pb2.Preflight, _Mapping]] = ..., link: _Optional[_Union[_types_pb2.LinkMeasured, _Mapping]] = ...) -> None: ...

class RanksStepping(_message.Message):
    __slots__ = ("job", "generation", "ranks", "step", "at", "phases")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    step: int
    at: float
    phases: _containers.RepeatedCompositeFieldContainer[PhaseTime]
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., step: _Optional[int] = ..., at: _Optional[float] = ..., phases: _Optional[_Iterable[_Union[PhaseTime, _Mapping]]] = ...) -> None: ...

class RanksFinished(_message.Message):
    __slots__ = ("job", "generation", "ranks", "at")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    ranks: _containers.RepeatedScalarFieldContainer[int]
    at: float
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., ranks: _Optional[_Iterable[int]] = ..., at: _Optional[float] = ...) -> None: ...

class Inventory(_message.Message):
    __slots__ = ("job", "shards", "stored", "base", "gone", "columns", "gone_runs")
    JOB_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    GONE_RUNS_FIELD_NUMBER: _ClassVar[int]
    job: str
    shards: _containers.RepeatedCompositeFieldContainer[_types_pb2.ShardRecord]
    stored: _containers.RepeatedCompositeFieldContainer[_types_pb2.StoredStep]
    base: int
    gone: _containers.RepeatedCompositeFieldContainer[_types_pb2.ShardPlace]
    columns: _types_pb2.ShardColumns
    gone_runs: _containers.RepeatedCompositeFieldContainer[_types_pb2.PlaceRun]
    def __init__(self, job: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[_types_pb2.ShardRecord, _Mapping]]] = ..., stored: _Optional[_Iterable[_Union[_types_pb2.StoredStep, _Mapping]]] = ..., base: _Optional[int] = ..., gone: _Optional[_Iterable[_Union[_types_pb2.ShardPlace, _Mapping]]] = ..., columns: _Optional[_Union[_types_pb2.ShardColumns, _Mapping]] = ..., gone_runs: _Optional[_Iterable[_Union[_types_pb2.PlaceRun, _Mapping]]] = ...) -> None: ...

class Tested(_message.Message):
    __slots__ = ("preflight",)
    PREFLIGHT_FIELD_NUMBER: _ClassVar[int]
    preflight: _types_pb2.Preflight
    def __init__(self, preflight: _Optional[_Union[_types_pb2.Preflight, _Mapping]] = ...) -> None: ...
