"""Which saved step a generation restores. Pure.

Theory. Every attempt (lineage of checkpoints) was forked from an older one at some step; the job's lineage lists, newest
first, the attempts that led to where it is, each with the last step that counts. An (attempt, step) is *complete* for a mesh
when each of its ranks can reach a shard of it on a connected node: in the mesh that saved it the rank's own shard; in another
number of replicas a shard of the same position in any replica, and then only when all known shards of that position agree
byte for byte, for if they do not, the state is sharded over dp and a shard of one replica is not the state of another.

The newest complete one wins. A half-saved, mixed or branched-off step never does: it is passed over with its reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.domain.generations import Placement, RankRestore, RestorePoint, ShardKey, ShardRecord, ShardSource
from holdfast.domain.mesh import Mesh

REASONS_MAX = 3
_TIER_ORDER = {"memory": 0, "disk": 1}


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
class Election:
    restore: RestorePoint
    mesh: Mesh | None = None  # that saved it; None = start from scratch
    ranks: tuple[RankRestore, ...] = ()  # by rank


def branch(lineage: Sequence[Segment], attempt: int, restore: RestorePoint, length_max: int) -> tuple[Segment, ...]:
    """The lineage after `attempt` has started from `restore`: what was given up can never be elected again."""
    if restore.step == 0:
        return (Segment(attempt),)
    rest = [segment for segment in lineage if segment.attempt <= restore.attempt]
    cut = [Segment(s.attempt, restore.step if s.attempt == restore.attempt else s.until) for s in rest]
    return (Segment(attempt), *cut)[:length_max]


def elect(
    lineage: Sequence[Segment], holders: Iterable[Holder], mesh: Mesh, placements: Sequence[Placement]
) -> Election:
    """The newest complete step on the lineage, and for each rank of `mesh` where its shard is, nearest first."""
    steps = _on_lineage(lineage, holders)
    refused: list[str] = []
    for attempt, step in sorted(steps, reverse=True):
        found = steps[attempt, step]
        ranks, why_not = _cover(attempt, step, found, mesh, placements)
        if ranks:
            reason = f"step {step} of attempt {attempt} is the newest that is complete on all {mesh.world_size} ranks"
            if refused:
                reason += f" (passed over: {'; '.join(refused[:REASONS_MAX])})"
            return Election(RestorePoint(attempt, step, reason), found[0][1].mesh, ranks)
        refused.append(f"step {step} of attempt {attempt}: {why_not}")
    if refused:
        return Election(
            RestorePoint(reason=f"no saved step is complete: start from step 0 ({'; '.join(refused[:REASONS_MAX])})")
        )
    return Election(RestorePoint())


_Found = list[tuple[Holder, ShardRecord]]


def _on_lineage(lineage: Sequence[Segment], holders: Iterable[Holder]) -> Mapping[tuple[int, int], _Found]:
    until = {segment.attempt: segment.until for segment in lineage}
    steps: dict[tuple[int, int], _Found] = defaultdict(list)
    for holder in sorted(holders, key=lambda holder: holder.node):
        for record in holder.shards:
            key = record.key
            if key.attempt in until and key.step > 0:
                last = until[key.attempt]
                if last is None or key.step <= last:
                    steps[key.attempt, key.step].append((holder, record))
    return steps


def _cover(
    attempt: int, step: int, found: _Found, mesh: Mesh, placements: Sequence[Placement]
) -> tuple[tuple[RankRestore, ...], str]:
    """A shard for every rank, or () and why not."""
    saved = found[0][1].mesh
    if any(record.mesh != saved for _, record in found):
        return (), "its shards come from different meshes"
    if saved.resized(1) != mesh.resized(1):
        return (), f"it was saved by the mesh {saved}, and only the number of replicas may change"
    same = saved.world_size == mesh.world_size
    by_place: dict[int, _Found] = defaultdict(list)
    for holder, record in found:
        by_place[record.key.rank if same else saved.position_of(record.key.rank)].append((holder, record))
    ranks = []
    for placement in placements:
        for rank in placement.ranks:
            candidates = by_place.get(rank if same else mesh.position_of(rank), [])
            if not candidates:
                return (), f"no connected node holds the shard of rank {rank}"
            if len(digests := {record.digest for _, record in candidates}) > 1:
                return (), _disagreement(rank, same, len(digests))
            ranks.append(_restore(rank, placement.node, candidates))
    return tuple(sorted(ranks, key=lambda restore: restore.rank)), ""


def _disagreement(rank: int, same: bool, digests: int) -> str:
    if same:
        return f"{digests} different shards claim to be that of rank {rank}"
    return (
        f"the replicas hold {digests} different shards at rank {rank}'s position: the state is sharded over dp, "
        "and re-sharding is not available"
    )


def _restore(rank: int, node: str, candidates: _Found) -> RankRestore:
    """All holders of one shard: the rank's own node first (memory before disk), then its failure domain, then the rest."""
    zone = next((holder.zone for holder, _ in candidates if holder.node == node), "")
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
    chosen = ordered[0][1]
    sources = {
        holder.node: ShardSource(holder.node, holder.endpoint) for holder, record in ordered if record.key == chosen.key
    }
    return RankRestore(
        rank, ShardKey(chosen.key.attempt, chosen.key.step, chosen.key.rank), chosen.digest, tuple(sources.values())
    )
