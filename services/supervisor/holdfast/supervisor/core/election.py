"""Which saved step a generation restores. Pure.

Theory. Every attempt (lineage of checkpoints) was forked from an older one at some step; the job's lineage lists, newest
first, the attempts that led to where it is, each with the last step that counts. An (attempt, step) is *complete* for a mesh
when each of its ranks can reach what it needs, on a connected node or in the object store:

* in the mesh that saved it: the rank's own shard;
* in another number of replicas, when the replicas hold the same at every position: any replica's shard of its position;
* … when they do not, the state is sharded over dp: the shards of *all* replicas at its position. The trainer takes from each
  what overlaps its own part.

The newest complete one wins, from wherever it comes: a newer step from a far tier costs seconds, an older one from a near
tier costs work. A half-saved, mixed, given-up or doubtful step never does: it is passed over with its reason.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from holdfast.domain.generations import (
    OBJECT_STORE,
    Placement,
    RankRestore,
    RestorePoint,
    ShardKey,
    ShardRecord,
    ShardSource,
    StoredStep,
)
from holdfast.domain.mesh import Mesh

REASONS_MAX = 3
SHARING_MAX = 8  # nodes that share what they take from the store: each of the others may cost a timeout
_TIER_ORDER = {"memory": 0, "disk": 1}


class Origin(IntEnum):
    """Where a rank's shard comes from, nearest first."""

    NOWHERE = 0  # the start from step 0
    MEMORY = 1
    DISK = 2
    PEER = 3
    STORE = 4

    def __str__(self) -> str:
        return ("nowhere", "local memory", "local disk", "another node", "the object store")[self]


@dataclass(frozen=True, slots=True)
class Segment:
    """One attempt of the lineage. Steps after `until` were given up when the next attempt branched off; None = all count."""

    attempt: int
    until: int | None = None


@dataclass(frozen=True, slots=True)
class Holder:
    """A connected node and what it holds of the job. Shards on spares and cordoned nodes count like any other."""

    node: str
    endpoint: str
    zone: str
    shards: tuple[ShardRecord, ...]


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


@dataclass(frozen=True, slots=True)
class Election:
    restore: RestorePoint
    mesh: Mesh | None = None  # that saved it; None = start from scratch
    ranks: tuple[RankRestore, ...] = ()  # by rank; several of one rank are parts of its state
    origin: Origin = Origin.NOWHERE  # the farthest that a rank has to go
    in_parts: bool = False  # each rank puts its state together from what all replicas saved


def branch(lineage: Sequence[Segment], attempt: int, restore: RestorePoint, length_max: int) -> tuple[Segment, ...]:
    """The lineage after `attempt` has started from `restore`: what was given up can never be elected again."""
    if restore.step == 0:
        return (Segment(attempt),)
    rest = [segment for segment in lineage if segment.attempt <= restore.attempt]
    cut = [Segment(s.attempt, restore.step if s.attempt == restore.attempt else s.until) for s in rest]
    return (Segment(attempt), *cut)[:length_max]


class Line:
    """The lineage, to be asked often."""

    def __init__(self, lineage: Iterable[Segment]) -> None:
        self._until = {segment.attempt: segment.until for segment in lineage}

    def holds(self, attempt: int, step: int) -> bool:
        """Whether a step that was saved by `attempt` has not been given up."""
        if step <= 0 or attempt not in self._until:
            return False
        last = self._until[attempt]
        return last is None or step <= last


def elect(
    lineage: Sequence[Segment],
    holders: Iterable[Holder],
    mesh: Mesh,
    placements: Sequence[Placement],
    known: Knowledge | None = None,
) -> Election:
    """The newest complete step on the lineage, and for each rank of `mesh` where its shards are, nearest first."""
    known = known or Knowledge()
    refused: list[str] = []
    holders = sorted(holders, key=lambda holder: holder.node)
    nodes = {holder.node: holder for holder in holders}
    saved_steps = _on_lineage(lineage, holders, known.origin, known.store)
    for saved in sorted(saved_steps, key=lambda saved: saved.key, reverse=True):
        found = _doubt(saved, known) or _cover(saved, known, mesh, placements, nodes)
        if not isinstance(found, str):
            return _elected(saved, found, mesh, refused)
        refused.append(f"step {saved.step} of attempt {saved.attempt}: {found}")
    if refused:
        return Election(
            RestorePoint(reason=f"no saved step is complete: start from step 0 ({'; '.join(refused[:REASONS_MAX])})")
        )
    return Election(RestorePoint())


# ---------------------------------------------------------------- what was saved


_Holding = tuple[Holder, ShardRecord]


@dataclass(slots=True)
class _Saved:
    """One saved step: who holds which shard of it, and which store has it."""

    attempt: int
    step: int
    held: list[_Holding] = field(default_factory=list)
    stored: StoredStep | None = None
    store: tuple[ShardSource, ...] = ()  # where all of its shards are; empty = in no store, or damaged there

    @property
    def key(self) -> tuple[int, int]:
        return self.attempt, self.step

    @property
    def meshes(self) -> list[Mesh]:
        """That saved it: one, unless something is wrong."""
        found = dict.fromkeys(record.mesh for _, record in self.held)
        return list(found | {self.stored.mesh: None} if self.stored else found)


def _on_lineage(lineage: Sequence[Segment], holders: Iterable[Holder], *stores: ObjectStore) -> list[_Saved]:
    line = Line(lineage)
    steps: dict[tuple[int, int], _Saved] = {}
    for holder in holders:
        for record in holder.shards:
            attempt, step = record.key.attempt, record.key.step
            if line.holds(attempt, step):
                steps.setdefault((attempt, step), _Saved(attempt, step)).held.append((holder, record))
    for store in stores:
        for stored in store.steps if store.url else ():
            if line.holds(stored.attempt, stored.step):
                key = stored.attempt, stored.step
                saved = steps.setdefault(key, _Saved(*key))
                saved.stored = stored
                saved.store = () if stored.damage else (ShardSource(OBJECT_STORE, store.url, store.job),)
    return list(steps.values())


def replicas_differ(records: Iterable[ShardRecord]) -> bool:
    """Whether these shards of one step show that its state is sharded over dp: equal positions, different tensors."""
    digests: dict[int, str] = {}
    mesh, replica_size = None, 1
    for record in records:
        if record.mesh is not mesh:
            mesh, replica_size = record.mesh, record.mesh.replica_size
        if digests.setdefault(record.key.rank % replica_size, record.digest) != record.digest:
            return True
    return False


# ---------------------------------------------------------------- can it be restored


@dataclass(frozen=True, slots=True)
class _Pick:
    node: str  # that restores
    restore: RankRestore
    origin: Origin


def _doubt(saved: _Saved, known: Knowledge) -> str:
    """Why it must not be restored, although it may be complete; empty when nothing is known against it."""
    if known.trusted is not None and saved.step > known.trusted.step:
        return f"after step {known.trusted.step}, the last one that was verified ({known.trusted.reason})"
    return known.doubts.get(saved.key, "")


def _cover(
    saved: _Saved, known: Knowledge, mesh: Mesh, placements: Sequence[Placement], nodes: Mapping[str, Holder]
) -> list[_Pick] | str:
    """What every rank restores, or why that cannot be."""
    meshes = saved.meshes
    if len(meshes) > 1:
        return "its shards come from different meshes"
    if meshes[0].resized(1) != mesh.resized(1):
        return f"it was saved by the mesh {meshes[0]}, and only the number of replicas may change"
    wanted = _wanted(saved, meshes[0], mesh, known.sharded)
    if isinstance(wanted, str):
        return wanted
    by_rank: dict[int, list[_Holding]] = defaultdict(list)
    for holding in saved.held:
        by_rank[holding[1].key.rank].append(holding)
    picks: list[_Pick] = []
    patterns: _Patterns = {}
    zones = {name: node.zone for name, node in nodes.items()}
    for placement in placements:
        for rank in placement.ranks:
            for choices in wanted(rank):
                candidates = [holding for choice in choices for holding in by_rank.get(choice, ())]
                if not candidates and not saved.store:
                    damaged = f"; in the object store, {saved.stored.damage}" if saved.stored else ""
                    return f"no connected node holds the shard of rank {choices[0]}{damaged}"
                if len(digests := {record.digest for _, record in candidates}) > 1:
                    return f"{len(digests)} different shards claim to be that of rank {choices[0]}"
                if wanted.same and candidates:
                    picks.append(_alike(rank, placement.node, candidates, zones, saved.store, patterns))
                else:
                    wanted_key = ShardKey(*saved.key, choices[0])
                    picks.append(_pick(rank, placement.node, candidates, wanted_key, zones, saved.store))
    picks = _shared(picks, saved, nodes)
    return sorted(picks, key=lambda pick: (pick.restore.rank, pick.restore.shard.rank))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Which saved ranks' shards a rank needs: all of the groups, and of each group any one. Best choice first."""

    saved: Mesh
    same: bool
    parts: bool

    def __call__(self, rank: int) -> Iterator[tuple[int, ...]]:
        if self.same:
            yield (rank,)
            return
        replicas = range(self.saved.position_of(rank), self.saved.world_size, self.saved.replica_size)
        if self.parts:
            yield from ((replica,) for replica in replicas)
        else:
            yield tuple(sorted(replicas, key=lambda replica: replica != rank))


def _wanted(saved: _Saved, before: Mesh, mesh: Mesh, sharded: bool | None) -> _Wanted | str:
    same = before.dp == mesh.dp
    if same or before.dp == 1:
        return _Wanted(before, same, parts=False)
    if sharded or (saved.stored is not None and saved.stored.sharded) or replicas_differ(r for _, r in saved.held):
        return _Wanted(before, same, parts=True)
    at_position = Counter(before.position_of(rank) for rank in {record.key.rank for _, record in saved.held})
    two_agree = max(at_position.values(), default=0) > 1  # what is sharded differs at every position
    if sharded is False or saved.stored is not None or two_agree:
        return _Wanted(before, same, parts=False)
    return (
        f"it was saved by {before.dp} replicas, and too few of its shards are known to tell whether each of them held all "
        "of the state"
    )


# Of a node that restores, and of who has a shard in which tier: all sources, nearest first, and how far the nearest is.
_Patterns = dict[tuple[str, tuple[tuple[str, str], ...]], tuple[tuple[ShardSource, ...], Origin]]


def _alike(
    rank: int,
    node: str,
    candidates: list[_Holding],
    zones: Mapping[str, str],
    store: tuple[ShardSource, ...],
    patterns: _Patterns,
) -> _Pick:
    """As `_pick`, of copies of the rank's own shard: those of a node's ranks are nearly always held alike."""
    key, digest = candidates[0][1].key, candidates[0][1].digest
    pattern = node, tuple([(holder.node, record.tier) for holder, record in candidates])
    if pattern not in patterns:
        first = _pick(rank, node, candidates, key, zones, store)
        patterns[pattern] = first.restore.sources, first.origin
    sources, origin = patterns[pattern]
    return _Pick(node, RankRestore(rank, key, digest, sources), origin)


def _pick(
    rank: int,
    node: str,
    candidates: list[_Holding],
    wanted: ShardKey,
    zones: Mapping[str, str],
    store: tuple[ShardSource, ...],
) -> _Pick:
    """All sources of one shard: the own node first (memory before disk), then its failure domain, the rest, the store."""
    zone = zones.get(node, "")
    ordered = sorted(
        candidates,
        key=lambda item: (
            item[0].node != node,
            item[1].key.rank != rank,
            item[0].zone != zone,
            _TIER_ORDER.get(item[1].tier, len(_TIER_ORDER)),
            item[0].node,
        ),
    )
    if not ordered:
        return _Pick(node, RankRestore(rank, wanted, "", store), Origin.STORE)
    nearest, chosen = ordered[0]
    sources = {
        holder.node: ShardSource(holder.node, holder.endpoint) for holder, record in ordered if record.key == chosen.key
    }
    restore = RankRestore(rank, chosen.key, chosen.digest, (*sources.values(), *store))
    if nearest.node != node:
        return _Pick(node, restore, Origin.PEER)
    return _Pick(node, restore, Origin.MEMORY if chosen.tier == "memory" else Origin.DISK)


def _shared(picks: list[_Pick], saved: _Saved, nodes: Mapping[str, Holder]) -> list[_Pick]:
    """Nodes that take the same tensors from the store are told of each other, at most `SHARING_MAX` at a time."""
    stored = saved.stored
    if stored is None:
        return picks

    def tensors(pick: _Pick) -> int:
        rank = pick.restore.shard.rank
        return rank if stored.sharded else stored.mesh.position_of(rank)

    takers: dict[int, list[str]] = defaultdict(list)
    for pick in picks:
        if pick.origin is Origin.STORE and pick.node in nodes and pick.node not in takers[tensors(pick)]:
            takers[tensors(pick)].append(pick.node)
    sharing: dict[tuple[int, str], tuple[ShardSource, ...]] = {}
    for which, names in takers.items():
        for start in range(0, len(names), SHARING_MAX):
            group = names[start : start + SHARING_MAX]
            sources = tuple(ShardSource(name, nodes[name].endpoint) for name in group)
            sharing |= {(which, name): sources for name in group if len(group) > 1}
    return [
        replace(pick, restore=replace(pick.restore, sharing=sharing.get((tensors(pick), pick.node), ())))
        if pick.origin is Origin.STORE
        else pick
        for pick in picks
    ]


# ---------------------------------------------------------------- the answer


def _elected(saved: _Saved, picks: list[_Pick], mesh: Mesh, refused: Sequence[str]) -> Election:
    reason = (
        f"step {saved.step} of attempt {saved.attempt} is the newest that is complete on all {mesh.world_size} ranks, "
        f"{_where_from(picks)}"
    )
    in_parts = len(picks) > mesh.world_size
    if in_parts:
        reason += f"; each rank's part is put together from those of {len(picks) // mesh.world_size} replicas"
    if refused:
        reason += f" (passed over: {'; '.join(refused[:REASONS_MAX])})"
    return Election(
        RestorePoint(saved.attempt, saved.step, reason),
        saved.meshes[0],
        tuple(pick.restore for pick in picks),
        max(pick.origin for pick in picks),
        in_parts,
    )


def _where_from(picks: Sequence[_Pick]) -> str:
    numbers = Counter(pick.origin for pick in picks)
    if len(numbers) == 1:
        return f"each from {picks[0].origin}" if len(picks) > 1 else f"from {picks[0].origin}"
    return ", ".join(f"{numbers[origin]} from {origin}" for origin in sorted(numbers))
