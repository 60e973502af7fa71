from holdfast.v1 import types_pb2 as _types_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("endpoint", "version")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    version: str
    def __init__(self, endpoint: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class ConfigureRequest(_message.Message):
    __slots__ = ("job", "generation", "attempt", "mesh", "ranks", "peers", "keep", "token", "store", "store_interval_s", "store_keep", "first_attempt")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    STORE_INTERVAL_S_FIELD_NUMBER: _ClassVar[int]
    STORE_KEEP_FIELD_NUMBER: _ClassVar[int]
    FIRST_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    attempt: int
    mesh: _types_pb2.Mesh
    ranks: _containers.RepeatedScalarFieldContainer[int]
    peers: _containers.RepeatedCompositeFieldContainer[_types_pb2.ShardSource]
    keep: int
    token: str
    store: str
    store_interval_s: float
    store_keep: int
    first_attempt: int
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., attempt: _Optional[int] = ..., mesh: _Optional[_Union[_types_pb2.Mesh, _Mapping]] = ..., ranks: _Optional[_Iterable[int]] = ..., peers: _Optional[_Iterable[_Union[_types_pb2.ShardSource, _Mapping]]] = ..., keep: _Optional[int] = ..., token: _Optional[str] = ..., store: _Optional[str] = ..., store_interval_s: _Optional[float] = ..., store_keep: _Optional[int] = ..., first_attempt: _Optional[int] = ...) -> None: ...

class ConfigureResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageRequest(_message.Message):
    __slots__ = ("job", "shards", "timeout_s")
    JOB_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    job: str
    shards: _containers.RepeatedCompositeFieldContainer[_types_pb2.RankRestore]
    timeout_s: float
    def __init__(self, job: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[_types_pb2.RankRestore, _Mapping]]] = ..., timeout_s: _Optional[float] = ...) -> None: ...

class StageResponse(_message.Message):
    __slots__ = ("shards",)
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[StagedShard]
    def __init__(self, shards: _Optional[_Iterable[_Union[StagedShard, _Mapping]]] = ...) -> None: ...

class StagedShard(_message.Message):
    __slots__ = ("rank", "shard", "path", "source", "size")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    shard: _types_pb2.ShardKey
    path: str
    source: str
    size: int
    def __init__(self, rank: _Optional[int] = ..., shard: _Optional[_Union[_types_pb2.ShardKey, _Mapping]] = ..., path: _Optional[str] = ..., source: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class ArchiveRequest(_message.Message):
    __slots__ = ("job", "generation", "step")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    step: int
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class ArchiveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RetainRequest(_message.Message):
    __slots__ = ("job", "attempt", "step")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    job: str
    attempt: int
    step: int
    def __init__(self, job: _Optional[str] = ..., attempt: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class RetainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchInventoryRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class ReplicatorInventory(_message.Message):
    __slots__ = ("job", "shards", "stored", "troubles")
    JOB_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    job: str
    shards: _containers.RepeatedCompositeFieldContainer[_types_pb2.ShardRecord]
    stored: _containers.RepeatedCompositeFieldContainer[_types_pb2.StoredStep]
    troubles: _containers.RepeatedCompositeFieldContainer[Trouble]
    def __init__(self, job: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[_types_pb2.ShardRecord, _Mapping]]] = ..., stored: _Optional[_Iterable[_Union[_types_pb2.StoredStep, _Mapping]]] = ..., troubles: _Optional[_Iterable[_Union[Trouble, _Mapping]]] = ...) -> None: ...

class Trouble(_message.Message):
    __slots__ = ("kind", "place", "reason", "since")
    KIND_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    kind: str
    place: str
    reason: str
    since: float
    def __init__(self, kind: _Optional[str] = ..., place: _Optional[str] = ..., reason: _Optional[str] = ..., since: _Optional[float] = ...) -> None: ...

class EndRequest(_message.Message):
    __slots__ = ("job", "generation")
    JOB_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    job: str
    generation: int
    def __init__(self, job: _Optional[str] = ..., generation: _Optional[int] = ...) -> None: ...

class EndResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PruneRequest(_message.Message):
    __slots__ = ("job", "steps")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    job: str
    steps: _containers.RepeatedCompositeFieldContainer[_types_pb2.SavedStep]
    def __init__(self, job: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[_types_pb2.SavedStep, _Mapping]]] = ...) -> None: ...

class PruneResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: str
    def __init__(self, job: _Optional[str] = ...) -> None: ...

class ForgetResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenLinkRequest(_message.Message):
    __slots__ = ("token", "limits", "for_s")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    token: str
    limits: _types_pb2.LinkLimits
    for_s: float
    def __init__(self, token: _Optional[str] = ..., limits: _Optional[_Union[_types_pb2.LinkLimits, _Mapping]] = ..., for_s: _Optional[float] = ...) -> None: ...

class OpenLinkResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class MeasureLinkRequest(_message.Message):
    __slots__ = ("node", "endpoint", "token", "limits")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    node: str
    endpoint: str
    token: str
    limits: _types_pb2.LinkLimits
    def __init__(self, node: _Optional[str] = ..., endpoint: _Optional[str] = ..., token: _Optional[str] = ..., limits: _Optional[_Union[_types_pb2.LinkLimits, _Mapping]] = ...) -> None: ...

class MeasureLinkResponse(_message.Message):
    __slots__ = ("measured",)
    MEASURED_FIELD_NUMBER: _ClassVar[int]
    measured: _types_pb2.LinkMeasured
    def __init__(self, measured: _Optional[_Union[_types_pb2.LinkMeasured, _Mapping]] = ...) -> None: ...

class CloseLinkRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseLinkResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
