"""Selects the checkpoint that a launch restores, from the reports of all ranks. Pure, so every rank computes the same result.

The rule is that of `holdfast.restore`; this module adds the differences without services. The lineage follows from the shards:
each names the (attempt, step) from which its attempt was forked. The user may have started any mesh, and no rank waits for a
missing node, so the terms allow any mesh and, as the last resort, another replica's state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from holdfast import restore
from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import Placement, ShardKey, ShardRecord
from holdfast.domain.mesh import Mesh

Step = CheckpointId

TERMS = restore.Terms(any_mesh=True, substitutes=True)


@dataclass(frozen=True, slots=True)
class Seat:
    """The node of a rank and the node's checkpoint directory, which other nodes may share."""

    node: str
    directory: str

    def reads(self, holding: Holding) -> bool:
        return holding.place in (self.node, self.directory)


@dataclass(frozen=True, slots=True)
class Holding:
    """A copy of a shard. `holder` is the rank that reported it and can send it; `digest` "" = not known yet."""

    key: ShardKey
    mesh: Mesh  # of the run that saved it
    parent: Step | None
    digest: str
    tier: str  # "memory" | "disk"
    path: str
    place: str  # the node (tier memory) or the directory (tier disk) of the copy
    holder: int

    @property
    def at(self) -> Step:
        return self.key.checkpoint

    @property
    def copy(self) -> tuple[int, str]:
        """Identifies the holding: (holder, path)."""
        return self.holder, self.path


@dataclass(frozen=True, slots=True)
class Election:
    """`parts[rank]` are the shards from which that rank restores: one, or several to assemble. Empty = from scratch."""

    at: Step | None
    reason: str
    mesh: Mesh | None = None
    parts: tuple[tuple[Holding, ...], ...] = ()
    complete: tuple[Step, ...] = ()  # every complete checkpoint on the lineage, oldest first

    def uses(self, copies: Collection[tuple[int, str]]) -> bool:
        """Whether a rank restores from one of `copies`."""
        return bool(copies) and any(part.copy in copies for parts in self.parts for part in parts)


def elect(
    holdings: Iterable[Holding], mesh: Mesh, seats: Sequence[Seat], bad: Collection[tuple[int, str]] = ()
) -> Election:
    """Select a checkpoint. `seats[rank]` is where each rank of `mesh` runs now. Copies in `bad` failed verification: they are
    not restored, but still show from which step their attempt was forked."""
    known = sorted(holdings, key=_total_order)
    lineage = restore.ancestry({holding.key.attempt: holding.parent for holding in known})
    good = [holding for holding in known if holding.copy not in bad]
    placements = [Placement(rank, seat.node, rank, 1) for rank, seat in enumerate(seats)]
    mounts = {seat.node: seat.directory for seat in seats}
    elected = restore.elect(lineage, _holders(good), mesh, placements, restore.Knowledge(mounts=mounts), TERMS)
    if elected.mesh is None:
        return Election(
            None, elected.restore.reason if good else "no copy verifies" if known else "nothing is saved here"
        )
    at = CheckpointId(elected.restore.attempt, elected.restore.step)
    nearest: dict[tuple[str, int], Holding] = {}
    for holding in good:
        if holding.at == at:
            nearest.setdefault((holding.place, holding.key.rank), holding)
    parts: list[list[Holding]] = [[] for _ in seats]
    for wanted in elected.ranks:
        parts[wanted.rank].append(nearest[wanted.sources[0].node, wanted.shard.rank])
    return Election(at, elected.restore.reason, elected.mesh, tuple(map(tuple, parts)), _complete(lineage, good))


def attempts(holdings: Iterable[Holding]) -> int:
    """Return the newest known attempt; 0 = none."""
    return max((holding.key.attempt for holding in holdings), default=0)


def _total_order(holding: Holding) -> tuple[object, ...]:
    """Sort key of all fields, so that the result does not depend on the order of the reports. A known digest precedes
    an unknown one."""
    key = (holding.key.attempt, holding.key.step, holding.key.rank)
    where = (holding.place, holding.path, holding.tier)
    return key, where, not holding.digest, holding.digest, holding.mesh.dims, holding.parent or (), holding.holder


def _holders(holdings: Iterable[Holding]) -> list[restore.Holder]:
    places: dict[str, list[ShardRecord]] = defaultdict(list)
    for each in holdings:
        places[each.place].append(ShardRecord(each.key, each.mesh, each.tier, 0, each.digest))
    return [restore.Holder(place, "", "", tuple(records)) for place, records in places.items()]


def _complete(lineage: Iterable[restore.Segment], holdings: Iterable[Holding]) -> tuple[Step, ...]:
    line = restore.Line(lineage)
    ranks: dict[Step, set[int]] = defaultdict(set)
    meshes: dict[Step, Mesh] = {}
    for holding in holdings:
        if line.holds(*holding.at):
            ranks[holding.at].add(holding.key.rank)
            meshes[holding.at] = holding.mesh
    return tuple(at for at in sorted(ranks) if len(ranks[at]) >= meshes[at].world_size)
