from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_MEMORY: _ClassVar[Tier]
    TIER_DISK: _ClassVar[Tier]

class Phase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PHASE_UNSPECIFIED: _ClassVar[Phase]
    PHASE_INIT: _ClassVar[Phase]
    PHASE_RESTORE: _ClassVar[Phase]
    PHASE_COMPILE: _ClassVar[Phase]
    PHASE_STEP: _ClassVar[Phase]
    PHASE_CHECKPOINT: _ClassVar[Phase]
    PHASE_EVAL: _ClassVar[Phase]
    PHASE_DONE: _ClassVar[Phase]
TIER_UNSPECIFIED: Tier
TIER_MEMORY: Tier
TIER_DISK: Tier
PHASE_UNSPECIFIED: Phase
PHASE_INIT: Phase
PHASE_RESTORE: Phase
PHASE_COMPILE: Phase
PHASE_STEP: Phase
PHASE_CHECKPOINT: Phase
PHASE_EVAL: Phase
PHASE_DONE: Phase

class Mesh(_message.Message):
    __slots__ = ("dims",)
    DIMS_FIELD_NUMBER: _ClassVar[int]
    dims: _containers.RepeatedCompositeFieldContainer[MeshDim]
    def __init__(self, dims: _Optional[_Iterable[_Union[MeshDim, _Mapping]]] = ...) -> None: ...

class MeshDim(_message.Message):
    __slots__ = ("name", "size")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class ShardKey(_message.Message):
    __slots__ = ("attempt", "step", "rank")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    step: int
    rank: int
    def __init__(self, attempt: _Optional[int] = ..., step: _Optional[int] = ..., rank: _Optional[int] = ...) -> None: ...

class ShardRecord(_message.Message):
    __slots__ = ("key", "mesh", "tier", "size_bytes", "digest", "owner", "root")
    KEY_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    key: ShardKey
    mesh: Mesh
    tier: Tier
    size_bytes: int
    digest: str
    owner: str
    root: str
    def __init__(self, key: _Optional[_Union[ShardKey, _Mapping]] = ..., mesh: _Optional[_Union[Mesh, _Mapping]] = ..., tier: _Optional[_Union[Tier, str]] = ..., size_bytes: _Optional[int] = ..., digest: _Optional[str] = ..., owner: _Optional[str] = ..., root: _Optional[str] = ...) -> None: ...

class ShardColumns(_message.Message):
    __slots__ = ("ranks", "attempts", "steps", "meshes", "mesh_of", "tiers", "sizes", "digests", "owners", "owner_of", "roots", "runs", "shape")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MESHES_FIELD_NUMBER: _ClassVar[int]
    MESH_OF_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    OWNER_OF_FIELD_NUMBER: _ClassVar[int]
    ROOTS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    attempts: _containers.RepeatedScalarFieldContainer[int]
    steps: _containers.RepeatedScalarFieldContainer[int]
    meshes: _containers.RepeatedCompositeFieldContainer[Mesh]
    mesh_of: _containers.RepeatedScalarFieldContainer[int]
    tiers: _containers.RepeatedScalarFieldContainer[Tier]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    digests: _containers.RepeatedScalarFieldContainer[str]
    owners: _containers.RepeatedScalarFieldContainer[str]
    owner_of: _containers.RepeatedScalarFieldContainer[int]
    roots: _containers.RepeatedScalarFieldContainer[str]
    runs: _containers.RepeatedCompositeFieldContainer[ShardRun]
    shape: bytes
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., attempts: _Optional[_Iterable[int]] = ..., steps: _Optional[_Iterable[int]] = ..., meshes: _Optional[_Iterable[_Union[Mesh, _Mapping]]] = ..., mesh_of: _Optional[_Iterable[int]] = ..., tiers: _Optional[_Iterable[_Union[Tier, str]]] = ..., sizes: _Optional[_Iterable[int]] = ..., digests: _Optional[_Iterable[str]] = ..., owners: _Optional[_Iterable[str]] = ..., owner_of: _Optional[_Iterable[int]] = ..., roots: _Optional[_Iterable[str]] = ..., runs: _Optional[_Iterable[_Union[ShardRun, _Mapping]]] = ..., shape: _Optional[bytes] = ...) -> None: ...

class ShardRun(_message.Message):
    __slots__ = ("attempt", "step", "mesh", "tier", "owner", "rank", "width", "sizes", "digests", "roots")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    ROOTS_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    step: int
    mesh: int
    tier: Tier
    owner: int
    rank: int
    width: int
    sizes: _containers.RepeatedScalarFieldContainer[int]
    digests: str
    roots: str
    def __init__(self, attempt: _Optional[int] = ..., step: _Optional[int] = ..., mesh: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., owner: _Optional[int] = ..., rank: _Optional[int] = ..., width: _Optional[int] = ..., sizes: _Optional[_Iterable[int]] = ..., digests: _Optional[str] = ..., roots: _Optional[str] = ...) -> None: ...

class ShardShape(_message.Message):
    __slots__ = ("meshes", "runs")
    MESHES_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    meshes: _containers.RepeatedCompositeFieldContainer[Mesh]
    runs: _containers.RepeatedCompositeFieldContainer[ShapedRun]
    def __init__(self, meshes: _Optional[_Iterable[_Union[Mesh, _Mapping]]] = ..., runs: _Optional[_Iterable[_Union[ShapedRun, _Mapping]]] = ...) -> None: ...

class ShapedRun(_message.Message):
    __slots__ = ("block", "attempt", "step", "mesh", "tier", "width", "sizes")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    block: int
    attempt: int
    step: int
    mesh: int
    tier: Tier
    width: int
    sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block: _Optional[int] = ..., attempt: _Optional[int] = ..., step: _Optional[int] = ..., mesh: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., width: _Optional[int] = ..., sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class SavedStep(_message.Message):
    __slots__ = ("attempt", "step")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    step: int
    def __init__(self, attempt: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class ShardPlace(_message.Message):
    __slots__ = ("key", "tier")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    key: ShardKey
    tier: Tier
    def __init__(self, key: _Optional[_Union[ShardKey, _Mapping]] = ..., tier: _Optional[_Union[Tier, str]] = ...) -> None: ...

class PlaceRun(_message.Message):
    __slots__ = ("attempt", "step", "tier", "rank", "width")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    step: int
    tier: Tier
    rank: int
    width: int
    def __init__(self, attempt: _Optional[int] = ..., step: _Optional[int] = ..., tier: _Optional[_Union[Tier, str]] = ..., rank: _Optional[int] = ..., width: _Optional[int] = ...) -> None: ...

class StoredStep(_message.Message):
    __slots__ = ("attempt", "step", "mesh", "sharded", "damage")
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MESH_FIELD_NUMBER: _ClassVar[int]
    SHARDED_FIELD_NUMBER: _ClassVar[int]
    DAMAGE_FIELD_NUMBER: _ClassVar[int]
    attempt: int
    step: int
    mesh: Mesh
    sharded: bool
    damage: str
    def __init__(self, attempt: _Optional[int] = ..., step: _Optional[int] = ..., mesh: _Optional[_Union[Mesh, _Mapping]] = ..., sharded: bool = ..., damage: _Optional[str] = ...) -> None: ...

class ShardSource(_message.Message):
    __slots__ = ("node", "endpoint", "job")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    node: str
    endpoint: str
    job: str
    def __init__(self, node: _Optional[str] = ..., endpoint: _Optional[str] = ..., job: _Optional[str] = ...) -> None: ...

class RankRestore(_message.Message):
    __slots__ = ("rank", "shard", "digest", "sources", "sharing", "root")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    SHARING_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    shard: ShardKey
    digest: str
    sources: _containers.RepeatedCompositeFieldContainer[ShardSource]
    sharing: _containers.RepeatedCompositeFieldContainer[ShardSource]
    root: str
    def __init__(self, rank: _Optional[int] = ..., shard: _Optional[_Union[ShardKey, _Mapping]] = ..., digest: _Optional[str] = ..., sources: _Optional[_Iterable[_Union[ShardSource, _Mapping]]] = ..., sharing: _Optional[_Iterable[_Union[ShardSource, _Mapping]]] = ..., root: _Optional[str] = ...) -> None: ...

class RestoreRun(_message.Message):
    __slots__ = ("rank", "shard", "digests", "sources", "sharing", "roots")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    SHARING_FIELD_NUMBER: _ClassVar[int]
    ROOTS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    shard: ShardKey
    digests: _containers.RepeatedScalarFieldContainer[str]
    sources: _containers.RepeatedCompositeFieldContainer[ShardSource]
    sharing: _containers.RepeatedCompositeFieldContainer[ShardSource]
    roots: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rank: _Optional[int] = ..., shard: _Optional[_Union[ShardKey, _Mapping]] = ..., digests: _Optional[_Iterable[str]] = ..., sources: _Optional[_Iterable[_Union[ShardSource, _Mapping]]] = ..., sharing: _Optional[_Iterable[_Union[ShardSource, _Mapping]]] = ..., roots: _Optional[_Iterable[str]] = ...) -> None: ...

class HangSpec(_message.Message):
    __slots__ = ("floor_s", "factor", "init_s")
    FLOOR_S_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    INIT_S_FIELD_NUMBER: _ClassVar[int]
    floor_s: float
    factor: float
    init_s: float
    def __init__(self, floor_s: _Optional[float] = ..., factor: _Optional[float] = ..., init_s: _Optional[float] = ...) -> None: ...

class Check(_message.Message):
    __slots__ = ("name", "ok", "detail")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    ok: bool
    detail: str
    def __init__(self, name: _Optional[str] = ..., ok: bool = ..., detail: _Optional[str] = ...) -> None: ...

class Preflight(_message.Message):
    __slots__ = ("at", "took_s", "checks")
    AT_FIELD_NUMBER: _ClassVar[int]
    TOOK_S_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    at: float
    took_s: float
    checks: _containers.RepeatedCompositeFieldContainer[Check]
    def __init__(self, at: _Optional[float] = ..., took_s: _Optional[float] = ..., checks: _Optional[_Iterable[_Union[Check, _Mapping]]] = ...) -> None: ...

class LinkLimits(_message.Message):
    __slots__ = ("bytes_max", "seconds_max")
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    SECONDS_MAX_FIELD_NUMBER: _ClassVar[int]
    bytes_max: int
    seconds_max: float
    def __init__(self, bytes_max: _Optional[int] = ..., seconds_max: _Optional[float] = ...) -> None: ...

class LinkMeasured(_message.Message):
    __slots__ = ("out_bytes_per_s", "in_bytes_per_s", "round_trip_s", "failure")
    OUT_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    IN_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    out_bytes_per_s: float
    in_bytes_per_s: float
    round_trip_s: float
    failure: str
    def __init__(self, out_bytes_per_s: _Optional[float] = ..., in_bytes_per_s: _Optional[float] = ..., round_trip_s: _Optional[float] = ..., failure: _Optional[str] = ...) -> None: ...

class ChecksSpec(_message.Message):
    __slots__ = ("replica_every_steps",)
    REPLICA_EVERY_STEPS_FIELD_NUMBER: _ClassVar[int]
    replica_every_steps: int
    def __init__(self, replica_every_steps: _Optional[int] = ...) -> None: ...
