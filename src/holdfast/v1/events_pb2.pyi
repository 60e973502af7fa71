from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FindingKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINDING_KIND_UNSPECIFIED: _ClassVar[FindingKind]
    FINDING_KIND_WORKER_CRASH: _ClassVar[FindingKind]
    FINDING_KIND_WORKER_EXCEPTION: _ClassVar[FindingKind]
    FINDING_KIND_REPEATED_EXCEPTION: _ClassVar[FindingKind]
    FINDING_KIND_NODE_LOST: _ClassVar[FindingKind]
    FINDING_KIND_HANG: _ClassVar[FindingKind]
    FINDING_KIND_GPU_ERROR: _ClassVar[FindingKind]
    FINDING_KIND_HOST_PRESSURE: _ClassVar[FindingKind]
    FINDING_KIND_RANKS_MISSING: _ClassVar[FindingKind]
    FINDING_KIND_SILENT_CORRUPTION: _ClassVar[FindingKind]
    FINDING_KIND_HOST_OOM: _ClassVar[FindingKind]
    FINDING_KIND_KERNEL_STALL: _ClassVar[FindingKind]
    FINDING_KIND_STORAGE_FAULT: _ClassVar[FindingKind]
    FINDING_KIND_NETWORK_FAULT: _ClassVar[FindingKind]
    FINDING_KIND_MAINTENANCE: _ClassVar[FindingKind]
    FINDING_KIND_STRAGGLER: _ClassVar[FindingKind]
    FINDING_KIND_IMBALANCE: _ClassVar[FindingKind]
    FINDING_KIND_SLOW_COLLECTIVE: _ClassVar[FindingKind]
    FINDING_KIND_NUMERICAL: _ClassVar[FindingKind]
    FINDING_KIND_DEGRADATION: _ClassVar[FindingKind]
    FINDING_KIND_PREFLIGHT: _ClassVar[FindingKind]
    FINDING_KIND_CHECKPOINT: _ClassVar[FindingKind]
    FINDING_KIND_NO_PROGRESS: _ClassVar[FindingKind]

class Severity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SEVERITY_UNSPECIFIED: _ClassVar[Severity]
    SEVERITY_INFO: _ClassVar[Severity]
    SEVERITY_WARNING: _ClassVar[Severity]
    SEVERITY_ERROR: _ClassVar[Severity]
    SEVERITY_FATAL: _ClassVar[Severity]

class Remedy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REMEDY_UNSPECIFIED: _ClassVar[Remedy]
    REMEDY_WATCH: _ClassVar[Remedy]
    REMEDY_RESTART_PROCESS: _ClassVar[Remedy]
    REMEDY_RESET_GPU: _ClassVar[Remedy]
    REMEDY_REBOOT_NODE: _ClassVar[Remedy]
    REMEDY_REPLACE_NODE: _ClassVar[Remedy]
    REMEDY_STOP_JOB: _ClassVar[Remedy]
FINDING_KIND_UNSPECIFIED: FindingKind
FINDING_KIND_WORKER_CRASH: FindingKind
FINDING_KIND_WORKER_EXCEPTION: FindingKind
FINDING_KIND_REPEATED_EXCEPTION: FindingKind
FINDING_KIND_NODE_LOST: FindingKind
FINDING_KIND_HANG: FindingKind
FINDING_KIND_GPU_ERROR: FindingKind
FINDING_KIND_HOST_PRESSURE: FindingKind
FINDING_KIND_RANKS_MISSING: FindingKind
FINDING_KIND_SILENT_CORRUPTION: FindingKind
FINDING_KIND_HOST_OOM: FindingKind
FINDING_KIND_KERNEL_STALL: FindingKind
FINDING_KIND_STORAGE_FAULT: FindingKind
FINDING_KIND_NETWORK_FAULT: FindingKind
FINDING_KIND_MAINTENANCE: FindingKind
FINDING_KIND_STRAGGLER: FindingKind
FINDING_KIND_IMBALANCE: FindingKind
FINDING_KIND_SLOW_COLLECTIVE: FindingKind
FINDING_KIND_NUMERICAL: FindingKind
FINDING_KIND_DEGRADATION: FindingKind
FINDING_KIND_PREFLIGHT: FindingKind
FINDING_KIND_CHECKPOINT: FindingKind
FINDING_KIND_NO_PROGRESS: FindingKind
SEVERITY_UNSPECIFIED: Severity
SEVERITY_INFO: Severity
SEVERITY_WARNING: Severity
SEVERITY_ERROR: Severity
SEVERITY_FATAL: Severity
REMEDY_UNSPECIFIED: Remedy
REMEDY_WATCH: Remedy
REMEDY_RESTART_PROCESS: Remedy
REMEDY_RESET_GPU: Remedy
REMEDY_REBOOT_NODE: Remedy
REMEDY_REPLACE_NODE: Remedy
REMEDY_STOP_JOB: Remedy

class Finding(_message.Message):
    __slots__ = ("id", "kind", "severity", "at", "since", "summary", "node", "job", "generation", "rank", "gpu", "confidence", "evidence", "ladder", "ttl_s", "traceparent", "waited_s", "repeat", "supersedes", "contradicts", "verified_step", "attribution", "notice", "cost_share")
    class EvidenceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    SUMMARY_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    LADDER_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    REPEAT_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDES_FIELD_NUMBER: _ClassVar[int]
    CONTRADICTS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_STEP_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    COST_SHARE_FIELD_NUMBER: _ClassVar[int]
    id: str
    kind: FindingKind
    severity: Severity
    at: float
    since: float
    summary: str
    node: str
    job: str
    generation: int
    rank: int
    gpu: int
    confidence: float
    evidence: _containers.ScalarMap[str, str]
    ladder: _containers.RepeatedScalarFieldContainer[Remedy]
    ttl_s: float
    traceparent: str
    waited_s: float
    repeat: int
    supersedes: str
    contradicts: str
    verified_step: int
    attribution: Attribution
    notice: AnnouncedMaintenance
    cost_share: float
    def __init__(self, id: _Optional[str] = ..., kind: _Optional[_Union[FindingKind, str]] = ..., severity: _Optional[_Union[Severity, str]] = ..., at: _Optional[float] = ..., since: _Optional[float] = ..., summary: _Optional[str] = ..., node: _Optional[str] = ..., job: _Optional[str] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., gpu: _Optional[int] = ..., confidence: _Optional[float] = ..., evidence: _Optional[_Mapping[str, str]] = ..., ladder: _Optional[_Iterable[_Union[Remedy, str]]] = ..., ttl_s: _Optional[float] = ..., traceparent: _Optional[str] = ..., waited_s: _Optional[float] = ..., repeat: _Optional[int] = ..., supersedes: _Optional[str] = ..., contradicts: _Optional[str] = ..., verified_step: _Optional[int] = ..., attribution: _Optional[_Union[Attribution, _Mapping]] = ..., notice: _Optional[_Union[AnnouncedMaintenance, _Mapping]] = ..., cost_share: _Optional[float] = ...) -> None: ...

class Attribution(_message.Message):
    __slots__ = ("blame", "error_class", "prior_user", "from_outside", "tries", "nodes", "observed_steps")
    BLAME_FIELD_NUMBER: _ClassVar[int]
    ERROR_CLASS_FIELD_NUMBER: _ClassVar[int]
    PRIOR_USER_FIELD_NUMBER: _ClassVar[int]
    FROM_OUTSIDE_FIELD_NUMBER: _ClassVar[int]
    TRIES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_STEPS_FIELD_NUMBER: _ClassVar[int]
    blame: str
    error_class: str
    prior_user: float
    from_outside: bool
    tries: int
    nodes: int
    observed_steps: int
    def __init__(self, blame: _Optional[str] = ..., error_class: _Optional[str] = ..., prior_user: _Optional[float] = ..., from_outside: bool = ..., tries: _Optional[int] = ..., nodes: _Optional[int] = ..., observed_steps: _Optional[int] = ...) -> None: ...

class AnnouncedMaintenance(_message.Message):
    __slots__ = ("source", "event", "starts_at", "at", "incarnation")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    STARTS_AT_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    source: str
    event: str
    starts_at: float
    at: float
    incarnation: str
    def __init__(self, source: _Optional[str] = ..., event: _Optional[str] = ..., starts_at: _Optional[float] = ..., at: _Optional[float] = ..., incarnation: _Optional[str] = ...) -> None: ...

class StepRecords(_message.Message):
    __slots__ = ("job", "generation", "world_size", "step", "started_at", "ended_at", "tokens", "loss", "stall_s", "flops", "published_at")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STARTED_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_AT_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    world_size: int
    step: _containers.RepeatedScalarFieldContainer[int]
    started_at: _containers.RepeatedScalarFieldContainer[float]
    ended_at: _containers.RepeatedScalarFieldContainer[float]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    loss: _containers.RepeatedScalarFieldContainer[float]
    stall_s: _containers.RepeatedScalarFieldContainer[float]
    flops: _containers.RepeatedScalarFieldContainer[float]
    published_at: float
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., world_size: _Optional[int] = ..., step: _Optional[_Iterable[int]] = ..., started_at: _Optional[_Iterable[float]] = ..., ended_at: _Optional[_Iterable[float]] = ..., tokens: _Optional[_Iterable[int]] = ..., loss: _Optional[_Iterable[float]] = ..., stall_s: _Optional[_Iterable[float]] = ..., flops: _Optional[_Iterable[float]] = ..., published_at: _Optional[float] = ...) -> None: ...
