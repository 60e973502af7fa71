"""Which saved step a start restores, from what every rank says is there. Pure: every rank computes the same answer.

Theory. Every start that restores a step begins a new attempt, and every shard says which (attempt, step) its attempt was
forked from. The newest attempt's chain of parents is the *lineage*; steps that an older attempt made beyond the fork were
given up and do not count. Of what counts the newest step wins that is complete:

* in the mesh that saved it, each rank's own shard: training goes on bit for bit;
* in another mesh of the same positions, a shard of the position, if all known shards there agree byte for byte;
* in any other mesh, or if they do not agree, every shard that was saved, as parts to put together.

Only when no step at all is complete in one of these ways is a rank given another replica's identical state in the same mesh.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.domain.generations import ShardKey
from holdfast.domain.mesh import Mesh

REASONS_MAX = 3
Step = tuple[int, int]  # (attempt, step)


@dataclass(frozen=True, slots=True)
class Holding:
    """One shard somewhere. `holder` is the rank that has seen it and can send it; `digest` "" = not known yet."""

    key: ShardKey
    mesh: Mesh  # of the run that saved it
    parent: Step | None
    digest: str
    tier: str  # "memory" | "disk"
    path: str
    node: str
    holder: int

    @property
    def at(self) -> Step:
        return self.key.attempt, self.key.step


@dataclass(frozen=True, slots=True)
class Election:
    """`parts[rank]` is what that rank restores from: one shard, or several to put together. Empty = from scratch."""

    at: Step | None
    reason: str
    mesh: Mesh | None = None
    parts: tuple[tuple[Holding, ...], ...] = ()
    complete: tuple[Step, ...] = ()  # every step on the lineage with all shards, oldest first


def elect(holdings: Iterable[Holding], mesh: Mesh, nodes: Sequence[str]) -> Election:
    """`nodes[rank]` is where each rank of `mesh` runs now."""
    steps = _on_lineage(sorted(holdings, key=_total_order))
    complete = tuple(sorted(at for at, found in steps.items() if _is_complete(found)))
    refused: list[str] = []
    for cover in (_cover, _substitute):
        for at in sorted(steps, reverse=True):
            parts, why_not = cover(steps[at], mesh, nodes)
            if parts:
                reason = (
                    f"step {at[1]} of attempt {at[0]} is the newest that is complete on all {mesh.world_size} ranks"
                )
                if refused:
                    reason += f" (passed over: {'; '.join(refused[:REASONS_MAX])})"
                return Election(at, reason, steps[at][0].mesh, parts, complete)
            if cover is _cover:
                refused.append(f"step {at[1]} of attempt {at[0]}: {why_not}")
    if not refused:
        return Election(None, "nothing is saved here")
    return Election(None, f"no saved step is complete: {'; '.join(refused[:REASONS_MAX])}")


def attempts(holdings: Iterable[Holding]) -> int:
    """The newest attempt that anything is known of; 0 = none."""
    return max((holding.key.attempt for holding in holdings), default=0)


def _total_order(holding: Holding) -> tuple[object, ...]:
    """By every field, so that nothing is left to the order of arrival: the ranks of a node all report the same file, and one
    of them may know its digest before the others do. A known digest comes before none."""
    key = (holding.key.attempt, holding.key.step, holding.key.rank)
    where = (holding.node, holding.path, holding.tier)
    return key, where, not holding.digest, holding.digest, holding.mesh.dims, holding.parent or (), holding.holder


def _on_lineage(holdings: list[Holding]) -> Mapping[Step, list[Holding]]:
    """What counts, by step, in the order of `holdings`. The chain goes by what shards say of their own attempt."""
    parents = {holding.key.attempt: holding.parent for holding in holdings}
    until: dict[int, int | None] = {}
    attempt = attempts(holdings)
    last: int | None = None
    while attempt in parents and attempt not in until:
        until[attempt] = last
        attempt, last = parents[attempt] or (0, 0)
    if attempt not in until:
        until[attempt] = last  # nothing of it is left but, perhaps, the forked-from step in somebody's memory
    steps: dict[Step, list[Holding]] = defaultdict(list)
    for holding in holdings:
        limit = until.get(holding.key.attempt, -1)
        if holding.key.step > 0 and (limit is None or holding.key.step <= limit):
            steps[holding.at].append(holding)
    return steps


def _is_complete(found: Sequence[Holding]) -> bool:
    return {holding.key.rank for holding in found} >= set(range(found[0].mesh.world_size))


_Parts = tuple[tuple[Holding, ...], ...]


def _cover(found: list[Holding], mesh: Mesh, nodes: Sequence[str]) -> tuple[_Parts, str]:
    """What each rank of `mesh` restores from, or () and why not."""
    saved = found[0].mesh
    if any(holding.mesh != saved for holding in found):
        return (), "its shards come from different meshes"
    own = _by_place(found, lambda rank: rank)
    if disputed := [rank for rank, those in sorted(own.items()) if len(_digests(those)) > 1]:
        return (), f"different shards claim to be that of rank {disputed[0]}"
    missing = sorted(set(range(saved.world_size)) - set(own))
    if saved == mesh:
        if missing:
            return (), f"the shard of rank {missing[0]} is missing"
        return tuple((_nearest(own[rank], nodes[rank]),) for rank in range(mesh.world_size)), ""
    replicated = _replicated(found, mesh, nodes)
    if replicated:
        return replicated, ""
    if missing:
        return (), f"its mesh was {saved}, and the shard of rank {missing[0]} is missing"
    parts = [tuple(_nearest(own[rank], node) for rank in range(saved.world_size)) for node in nodes]
    return tuple(parts), ""


def _substitute(found: list[Holding], mesh: Mesh, nodes: Sequence[str]) -> tuple[_Parts, str]:
    """In the mesh that saved it: another replica's identical state where a rank's own shard is lost."""
    if any(holding.mesh != mesh for holding in found):
        return (), "it was saved by another mesh"
    replicated = _replicated(found, mesh, nodes)
    if not replicated:
        return (), "no replica's state is whole"
    own = _by_place(found, lambda rank: rank)
    exact = [(_nearest(own[rank], nodes[rank]),) if rank in own else parts for rank, parts in enumerate(replicated)]
    return tuple(exact), ""


def _replicated(found: list[Holding], mesh: Mesh, nodes: Sequence[str]) -> _Parts:
    """A shard of each rank's position, when only the number of replicas differs and the replicas agree; else ()."""
    saved = found[0].mesh
    if saved.resized(1) != mesh.resized(1):
        return ()
    known = [holding for holding in found if holding.digest]
    by_position = _by_place(known, saved.position_of)
    if set(by_position) != set(range(saved.replica_size)):
        return ()
    if any(len(_digests(those)) > 1 for those in by_position.values()):
        return ()
    return tuple((_nearest(by_position[mesh.position_of(rank)], nodes[rank], rank),) for rank in range(mesh.world_size))


def _by_place(found: Iterable[Holding], place: Callable[[int], int]) -> dict[int, list[Holding]]:
    places: dict[int, list[Holding]] = defaultdict(list)
    for holding in found:
        places[place(holding.key.rank)].append(holding)
    return places


def _digests(holdings: Iterable[Holding]) -> set[str]:
    return {holding.digest for holding in holdings if holding.digest}


def _nearest(candidates: Iterable[Holding], node: str, rank: int | None = None) -> Holding:
    """The rank's own shard before another replica's, then the same node, then memory before disk."""
    return min(
        candidates,
        key=lambda it: (
            rank not in (None, it.key.rank),
            it.node != node,
            it.tier != "memory",
            it.node,
            it.path,
            _total_order(it),
        ),
    )
