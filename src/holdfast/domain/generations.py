"""A generation: one consistent assignment of ranks to nodes, and what each rank starts from.

Every change of the assignment makes a new generation; its number is carried by every message, and workers of an older one
exit. The *attempt* is the lineage of checkpoints: it is bumped whenever training goes back to a saved step, so that step
1,100 before a rollback and step 1,100 after it can never be mixed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Placement:
    """One slot of the job: `node` runs ranks `first_rank … first_rank + nproc - 1`."""

    slot: int
    node: str
    first_rank: int
    nproc: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.nproc)


@dataclass(frozen=True, slots=True)
class ShardKey:
    """Names one saved shard: who saved it, in which lineage, at which step."""

    attempt: int
    step: int
    rank: int

    @property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId(self.attempt, self.step)


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One line of a node's inventory: a shard that is whole, verified and readable there."""

    key: ShardKey
    mesh: Mesh  # of the generation that saved it
    tier: str  # "memory" | "disk"
    size: int  # bytes of the shard file
    digest: str  # checksum of the tensor bytes: equal digests at equal positions = identical state
    owner: str = ""  # the node whose worker saved it; differs from the holder for a peer's copy


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """One line of a node's inventory by its name."""

    key: ShardKey
    tier: str


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A checkpoint that is complete in the job's object store: its manifest is there, and with it every shard."""

    attempt: int
    step: int
    mesh: Mesh  # of the generation that saved it
    sharded: bool  # over dp: replicas hold different tensors, so that a resize needs the shards of all of them
    damage: str = ""  # what was found wrong with it since; empty = nothing is known

    @property
    def id(self) -> CheckpointId:
        return CheckpointId(self.attempt, self.step)


OBJECT_STORE = "object store"  # as the node of a ShardSource: no node can be called so, for it has a space


@dataclass(frozen=True, slots=True)
class ShardSource:
    """Where a shard can be fetched: a replicator's data endpoint, `host:port`; or the job's object store, whose URL it is
    when `node` is `OBJECT_STORE`."""

    node: str
    endpoint: str
    job: str = ""  # under whose name it lies in the object store; empty = the job's own


@dataclass(frozen=True, slots=True)
class RankRestore:
    """One shard that one rank restores from, and its holders, nearest first (its own node leads when it holds it).

    A rank whose state was sharded otherwise has several: it takes from each what overlaps its own part.
    """

    rank: int
    shard: ShardKey
    digest: str  # empty = not known here: the manifest that comes with the shard vouches for it
    sources: tuple[ShardSource, ...]
    # The nodes, this one among them, that take the same tensors from the object store now, in the same order for all: each
    # fetches a part and has the rest from the others. Empty: nobody else does.
    sharing: tuple[ShardSource, ...] = ()


@dataclass(frozen=True, slots=True)
class RestoreRun:
    """What consecutive ranks restore, each one shard of consecutive ones, from the same sources."""

    rank: int  # the first
    shard: ShardKey  # its
    digests: tuple[str, ...]  # by rank
    sources: tuple[ShardSource, ...]
    sharing: tuple[ShardSource, ...] = ()

    def __iter__(self) -> Iterator[RankRestore]:
        attempt, step, shard = self.shard.attempt, self.shard.step, self.shard.rank
        for place, digest in enumerate(self.digests):
            key = ShardKey(attempt, step, shard + place)
            yield RankRestore(self.rank + place, key, digest, self.sources, self.sharing)


def joined(restores: Iterable[RestoreRun], width: int) -> tuple[RestoreRun, ...]:
    """The same in runs as long as possible, none of which crosses a multiple of `width`, if none of these does."""
    found: list[RestoreRun] = []
    for each in restores:
        if found and each.rank % width and _follows(found[-1], each):
            last = found[-1]
            found[-1] = RestoreRun(last.rank, last.shard, last.digests + each.digests, last.sources, last.sharing)
        else:
            found.append(each)
    return tuple(found)


def _follows(last: RestoreRun, each: RestoreRun) -> bool:
    before, after, count = last.shard, each.shard, len(last.digests)
    return (
        each.rank == last.rank + count
        and after.rank == before.rank + count
        and (after.step, after.attempt) == (before.step, before.attempt)
        and (each.sources is last.sources or each.sources == last.sources)
        and (each.sharing is last.sharing or each.sharing == last.sharing)
    )


@dataclass(frozen=True, slots=True)
class RestorePoint:
    """The elected step: the newest that is complete across all needed shards. `step` 0 = start from scratch."""

    attempt: int = 0
    step: int = 0
    reason: str = "nothing saved yet: start from step 0"


@dataclass(frozen=True, slots=True)
class Generation:
    number: int
    attempt: int
    mesh: Mesh
    placements: tuple[Placement, ...]  # by slot
    restore: RestorePoint = field(default_factory=RestorePoint)
    # What follows from the placements, made when it is first asked for: of 12,500 nodes each report asks several times.
    _nodes: tuple[str, ...] | None = field(default=None, init=False, repr=False, compare=False)
    _places: Mapping[str, int] | None = field(default=None, init=False, repr=False, compare=False)  # node → place

    @property
    def nodes(self) -> tuple[str, ...]:
        """By slot; the same object whenever it is asked for."""
        if self._nodes is None:
            object.__setattr__(self, "_nodes", tuple(placement.node for placement in self.placements))
            assert self._nodes is not None
        return self._nodes

    def node_of(self, rank: int) -> str:
        place = bisect_right(self.placements, rank, key=lambda placement: placement.first_rank) - 1
        if place < 0 or rank not in self.placements[place].ranks:
            raise LookupError(f"rank {rank} is not in generation {self.number} ({self.mesh})")
        return self.placements[place].node

    def placement_of(self, node: str) -> Placement | None:
        if self._places is None:
            object.__setattr__(self, "_places", {each.node: place for place, each in enumerate(self.placements)})
            assert self._places is not None
        place = self._places.get(node)
        return None if place is None else self.placements[place]

    def slot_of(self, node: str) -> int | None:
        placement = self.placement_of(node)
        return None if placement is None else placement.slot
