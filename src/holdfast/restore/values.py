"""Input and result values of a checkpoint selection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import RankRestore, RestorePoint, RestoreRun, ShardRecord, StoredStep
from holdfast.domain.mesh import Mesh


class Origin(IntEnum):
    """Where a rank's shard comes from, nearest first."""

    NOWHERE = 0  # the start from step 0
    MEMORY = 1
    DISK = 2
    PEER = 3
    STORE = 4

    def __str__(self) -> str:
        return ("nowhere", "local memory", "local disk", "another node", "the object store")[self]


class Holder(NamedTuple):  # three times as fast as a frozen dataclass; created per node of a job at every selection
    """A connected node with its shards of the job. Shards on spares and cordoned nodes count as well."""

    node: str
    endpoint: str
    zone: str
    shards: Sequence[ShardRecord]  # digest "" = not known yet; it matches every other digest


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """An object store and the complete checkpoints that are known to be in it."""

    url: str = ""
    steps: tuple[StoredStep, ...] = ()
    job: str = ""  # the job that saved the steps; "" = this job


@dataclass(frozen=True, slots=True)
class Trusted:
    """The last step that may be restored, because the state is known to be wrong at some later step."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Knowledge:
    """Facts about a job's saved steps, other than the nodes' inventories."""

    store: ObjectStore = field(default_factory=ObjectStore)
    origin: ObjectStore = field(default_factory=ObjectStore)  # with the step of another job from which this job started
    sharded: bool | None = None  # over dp, according to a step with all shards known; None = no such step was seen
    doubts: Mapping[CheckpointId, str] = field(default_factory=dict)  # why not to restore it
    trusted: Trusted | None = None
    mounts: Mapping[str, str] = field(default_factory=dict)  # node → another holder whose shards it can read directly


@dataclass(frozen=True, slots=True)
class Terms:
    """Capabilities of the caller. The defaults are those of a job in whose mesh only the number of replicas changes."""

    any_mesh: bool = False  # it can assemble the state from all shards of a mesh with other dimensions
    substitutes: bool = False  # if no step is complete, it accepts another replica's identical state for a lost shard


@dataclass(frozen=True, slots=True)
class Election:
    restore: RestorePoint
    mesh: Mesh | None = None  # the mesh that saved the step; None = start from scratch
    runs: tuple[RestoreRun, ...] = ()  # by rank; several of one rank are parts of its state
    origin: Origin = Origin.NOWHERE  # the farthest source of any rank
    in_parts: bool = False  # each rank assembles its state from several shards

    @property
    def ranks(self) -> tuple[RankRestore, ...]:
        return tuple(chain.from_iterable(self.runs))
