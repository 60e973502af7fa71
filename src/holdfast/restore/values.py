"""What an election is asked with, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from typing import NamedTuple

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


class Holder(NamedTuple):  # made in a third of the time of a frozen dataclass: of each node of a job at every election
    """A connected node and what it holds of the job. Shards on spares and cordoned nodes count like any other."""

    node: str
    endpoint: str
    zone: str
    shards: Sequence[ShardRecord]  # a digest "" is not known yet: it agrees with every other one


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """An object store and what is known to be complete in it."""

    url: str = ""
    steps: tuple[StoredStep, ...] = ()
    job: str = ""  # whose steps; empty = the job's own


@dataclass(frozen=True, slots=True)
class Trusted:
    """Nothing after `step` may be restored: the state is known to have gone wrong some time after it."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What else is known of a job's saved steps, besides who holds them."""

    store: ObjectStore = field(default_factory=ObjectStore)
    origin: ObjectStore = field(default_factory=ObjectStore)  # with another job's step that this one started from
    sharded: bool | None = None  # over dp, as seen at a step of which every shard was known; None = never seen one
    doubts: Mapping[tuple[int, int], str] = field(default_factory=dict)  # (attempt, step) → why not this one
    trusted: Trusted | None = None
    mounts: Mapping[str, str] = field(default_factory=dict)  # node → the holder whose shards it can read itself, too


@dataclass(frozen=True, slots=True)
class Terms:
    """What the caller can do with a step. The defaults are those of a job whose mesh changes in its replicas only."""

    any_mesh: bool = False  # the state is put together from all shards of a mesh with other dimensions
    substitutes: bool = False  # when no step is complete: another replica's identical state for a shard that is lost


@dataclass(frozen=True, slots=True)
class Election:
    restore: RestorePoint
    mesh: Mesh | None = None  # that saved it; None = start from scratch
    runs: tuple[RestoreRun, ...] = ()  # by rank; several of one rank are parts of its state
    origin: Origin = Origin.NOWHERE  # the farthest that a rank has to go
    in_parts: bool = False  # each rank puts its state together from several shards

    @property
    def ranks(self) -> tuple[RankRestore, ...]:
        return tuple(chain.from_iterable(self.runs))
