"""The restore election of the supervisor: selects the saved step by the rule of `holdfast.restore`, and shares downloads.

The mesh of a job changes only in its number of replicas, and the job may wait or continue with fewer of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from holdfast import restore
from holdfast.domain.generations import OBJECT_STORE, Placement, RankRestore, RestoreRun, ShardSource, StoredStep
from holdfast.domain.mesh import Mesh
from holdfast.restore import (
    Election,
    Holder,
    Knowledge,
    Line,
    ObjectStore,
    Origin,
    Segment,
    Trusted,
    branch,
    replicas_differ,
)

__all__ = [
    "SHARING_MAX",
    "Election",
    "Holder",
    "Knowledge",
    "Line",
    "ObjectStore",
    "Origin",
    "Segment",
    "Trusted",
    "branch",
    "elect",
    "replicas_differ",
]

SHARING_MAX = 8  # nodes that share downloads from the object store: each of the others may cost a timeout


def elect(
    lineage: Sequence[Segment],
    holders: Iterable[Holder],
    mesh: Mesh,
    placements: Sequence[Placement],
    known: Knowledge | None = None,
) -> Election:
    """The newest complete step on the lineage, with the sources of each rank's shards, nearest first."""
    holders = list(holders)
    elected = restore.elect(lineage, holders, mesh, placements, known)
    if elected.origin is not Origin.STORE or known is None:
        return elected
    at = elected.restore.attempt, elected.restore.step
    stores = [store for store in (known.origin, known.store) if store.url]
    stored = {(each.attempt, each.step): each for store in stores for each in store.steps}[at]
    return replace(elected, runs=_share_downloads(elected.ranks, stored, holders, placements))


def _share_downloads(
    ranks: Sequence[RankRestore], stored: StoredStep, holders: Iterable[Holder], placements: Iterable[Placement]
) -> tuple[RestoreRun, ...]:
    """Nodes that download the same tensors get each other's addresses, at most `SHARING_MAX` per group."""
    nodes = {holder.node: ShardSource(holder.node, holder.endpoint) for holder in holders}
    node_of = {rank: placement.node for placement in placements for rank in placement.ranks}

    def tensors(wanted: RankRestore) -> int:
        return wanted.shard.rank if stored.sharded else stored.mesh.position_of(wanted.shard.rank)

    takers: dict[int, dict[str, None]] = defaultdict(dict)
    for wanted in ranks:
        if wanted.sources[0].node == OBJECT_STORE and node_of[wanted.rank] in nodes:
            takers[tensors(wanted)].setdefault(node_of[wanted.rank])
    sharing: dict[tuple[int, str], tuple[ShardSource, ...]] = {}
    for which, taking in takers.items():
        names = list(taking)
        for start in range(0, len(names), SHARING_MAX):
            group = names[start : start + SHARING_MAX]
            sources = tuple(nodes[name] for name in group)
            sharing.update({(which, name): sources for name in group if len(group) > 1})
    return tuple(
        RestoreRun(
            wanted.rank,
            wanted.shard,
            (wanted.digest,),
            wanted.sources,
            sharing.get((tensors(wanted), node_of[wanted.rank]), ())
            if wanted.sources[0].node == OBJECT_STORE
            else wanted.sharing,
            (wanted.root,) if wanted.root else (),
        )
        for wanted in ranks
    )
