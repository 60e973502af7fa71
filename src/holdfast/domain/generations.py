"""Generations: one consistent assignment of ranks to nodes, and the shards that each rank restores from.

Every change of the assignment creates a new generation. Every message contains its number, and workers of older generations
end. The *attempt* is the number under which a generation saves checkpoints. Every restore increases it, so that step 1,100
before a rollback and step 1,100 after the rollback are never mixed.
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
    """Identifies a shard: the attempt and the step of its checkpoint, and the rank that saved it."""

    attempt: int
    step: int
    rank: int

    @property
    def checkpoint(self) -> CheckpointId:
        return CheckpointId(self.attempt, self.step)


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One entry of a node's inventory: a shard that is intact, verified and readable on the node."""

    key: ShardKey
    mesh: Mesh  # of the generation that saved it
    tier: str  # "memory" | "disk"
    size: int  # bytes of the shard file
    digest: str  # checksum of the tensor bytes: ranks at equal positions with equal digests have identical state
    owner: str = ""  # the node whose worker saved the shard; for a copy of a peer, not the node that holds it
    root: str = ""  # cryptographic digest of all bytes and of the manifest; empty = an earlier release saved the shard


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Identifies an entry of a node's inventory."""

    key: ShardKey
    tier: str


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A checkpoint that is complete in the job's object store: its manifest exists, and therefore all its shards."""

    attempt: int
    step: int
    mesh: Mesh  # of the generation that saved it
    sharded: bool  # over dp: replicas hold different tensors, so that a resize needs the shards of all replicas
    damage: str = ""  # damage that was found later; empty = none is known

    @property
    def id(self) -> CheckpointId:
        return CheckpointId(self.attempt, self.step)


OBJECT_STORE = "object store"  # `node` of a ShardSource; no node has this name, because node names contain no space


@dataclass(frozen=True, slots=True)
class ShardSource:
    """A source of a shard: a replicator or, if `node` is `OBJECT_STORE`, the job's object store."""

    node: str
    endpoint: str  # the replicator's data endpoint, `host:port`, or the URL of the object store
    job: str = ""  # job under whose name the shard is in the object store; empty = the job itself


@dataclass(frozen=True, slots=True)
class RankRestore:
    """One shard that a rank restores from, and its sources, nearest first (the rank's own node is first if it is one).

    A rank whose state was sharded differently has several entries. It takes from each shard the part that overlaps its own.
    """

    rank: int
    shard: ShardKey
    digest: str  # empty = not known; then the shard is verified only by the manifest that comes with it
    sources: tuple[ShardSource, ...]
    # Nodes, including this one, that fetch the same tensors from the object store at the same time, in the same order on all
    # nodes. Each node downloads a part and gets the other parts from the other nodes. Empty: no other node needs the tensors.
    sharing: tuple[ShardSource, ...] = ()
    root: str = ""  # of `ShardRecord`: a source that offers another one is refused. Empty = not known


@dataclass(frozen=True, slots=True)
class RestoreRun:
    """The shards that consecutive ranks restore: one shard per rank, of consecutive ranks, from the same sources."""

    rank: int  # the first rank
    shard: ShardKey  # shard of the first rank
    digests: tuple[str, ...]  # by rank
    sources: tuple[ShardSource, ...]
    sharing: tuple[ShardSource, ...] = ()
    roots: tuple[str, ...] = ()  # by rank; empty = none is known

    @property
    def all_roots(self) -> tuple[str, ...]:
        """One entry for each rank."""
        return self.roots or ("",) * len(self.digests)

    def __iter__(self) -> Iterator[RankRestore]:
        attempt, step, shard = self.shard.attempt, self.shard.step, self.shard.rank
        for place, (digest, root) in enumerate(zip(self.digests, self.all_roots, strict=True)):
            key = ShardKey(attempt, step, shard + place)
            yield RankRestore(self.rank + place, key, digest, self.sources, self.sharing, root)


def joined(restores: Iterable[RestoreRun], width: int) -> tuple[RestoreRun, ...]:
    """Join the runs into runs as long as possible. No result crosses a multiple of `width` if none of `restores` does."""
    found: list[RestoreRun] = []
    for each in restores:
        if found and each.rank % width and _follows(found[-1], each):
            last = found[-1]
            roots = last.all_roots + each.all_roots if last.roots or each.roots else ()
            digests = last.digests + each.digests
            found[-1] = RestoreRun(last.rank, last.shard, digests, last.sources, last.sharing, roots)
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
    """The selected checkpoint: the newest one for which all needed shards are reachable. `step` 0 = start from scratch."""

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
    # Derived from the placements on first use and cached: each report of 12,500 nodes uses them several times.
    _nodes: tuple[str, ...] | None = field(default=None, init=False, repr=False, compare=False)
    _places: Mapping[str, int] | None = field(default=None, init=False, repr=False, compare=False)  # node → place

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes, by slot. Always the same object."""
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
