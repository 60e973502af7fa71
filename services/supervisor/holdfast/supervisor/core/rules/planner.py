"""Assigns ranks to nodes for the next generation. Pure.

Theory of operation. A *group* is the smallest set of whole nodes that can leave or return without breaking a replica: the nodes
of one replica, or one node that holds several replicas. Where dp is not the outermost dimension, a group has nodes in each row
(`Mesh.grouping`), and nodes that hold parts of several replicas tie these together. A plan starts from the groups of the
previous generation. It adds empty groups until there are enough for the wanted dp, or removes those with the most holes if
there are too many, and fills the holes with spares. If there are too few spares and fewer replicas are allowed, the group with
the most holes leaves and its healthy nodes become spares: two half-broken replicas can then make a complete one.

Kept nodes keep their coordinates in the mesh, so their local shards remain the right ones. They also keep their slots and
ranks if dp stays the same or is outermost. Only if a group leaves from the middle does the last group move into the gap, since
data-parallel indices are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from holdfast.domain.generations import Placement
from holdfast.domain.job import JobSpec
from holdfast.domain.mesh import Grouping, Mesh
from holdfast.domain.words import plural


@dataclass(frozen=True, slots=True)
class Spare:
    """A free node. Preferred in this order: not on probation, not reserved for a job of lower priority, fewest expected faults.

    Fault rates are estimates, so `repute` compares them by powers of two. Otherwise two nodes without faults would differ by
    how long each is known.
    """

    node: str
    zone: str = ""
    faults_per_day: float = 0.0
    on_probation: bool = False
    reserved: bool = False  # for a job of lower priority
    repute: tuple[bool, bool, float] = field(init=False)

    def __post_init__(self) -> None:
        rate = self.faults_per_day
        expected = round(math.log2(rate)) if rate > 0 else -math.inf
        object.__setattr__(self, "repute", (self.on_probation, self.reserved, expected))


@dataclass(frozen=True, slots=True)
class Request:
    spec: JobSpec
    dp: int  # replicas wanted
    dp_min: int  # fewer than `dp` are accepted, down to this number
    placements: tuple[Placement, ...] = ()  # of the previous generation
    out: frozenset[str] = frozenset()  # nodes that must not stay
    spares: tuple[Spare, ...] = ()
    zones: Mapping[str, str] = field(default_factory=dict)  # node → failure domain, of the previous generation's nodes
    rates: Mapping[str, float] = field(default_factory=dict)  # node → expected faults a day, of the same nodes
    on_probation: frozenset[str] = frozenset()  # of the same nodes


@dataclass(frozen=True, slots=True)
class Plan:
    mesh: Mesh
    placements: tuple[Placement, ...]
    reason: str  # one English sentence

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(placement.node for placement in self.placements)


@dataclass(frozen=True, slots=True)
class Unplannable:
    reason: str
    nodes_missing: int = 0  # with room for the workers; 0 = the cause is not a lack of nodes


_Group = list[str | None]  # nodes by slot within the group; None = a hole


def plan(request: Request) -> Plan | Unplannable:
    """The best assignment for `request`, or why there is none. Equal requests get equal plans."""
    spec = request.spec
    grouping = spec.mesh.grouping(spec.nproc_per_node)
    wanted = -(-request.dp // grouping.replicas)
    least = -(-request.dp_min // grouping.replicas)
    if not spec.mesh.is_dp_outermost:  # a partly used group would have unused workers in each row
        wanted = request.dp // grouping.replicas
        if wanted < max(1, least):
            return Unplannable(_indivisible(request, grouping))
    if request.dp < max(1, request.dp_min):
        return Unplannable(f"{spec.name} cannot run {request.dp} replicas: it needs at least {request.dp_min}")
    pool = {spare.node: spare for spare in request.spares if spare.node not in request.out}
    if (unchanged := _with_holes_filled(request, grouping, wanted, pool)) is not None:
        return unchanged

    before = _previous_groups(request, grouping)
    groups: list[_Group] = [[None if node in request.out else node for node in group] for group in before]
    groups.extend([None] * grouping.nodes for _ in range(wanted - len(groups)))
    while len(groups) > wanted or (_holes(groups) > len(pool) and len(groups) > least):
        for node in _drop_worst(groups):
            zone, rate = request.zones.get(node, ""), request.rates.get(node, 0.0)
            pool[node] = Spare(node, zone, rate, node in request.on_probation)
    if (missing := _holes(groups) - len(pool)) > 0:
        return Unplannable(_shortage(request, least * grouping.nodes, missing), missing)

    moves = _fill(dict(enumerate(groups)), len(groups), dict(enumerate(before)), pool, request, grouping)
    slots = {
        grouping.slot(number, index, len(groups)): node
        for number, group in enumerate(groups)
        for index, node in enumerate(group)
        if node is not None
    }
    nodes = [slots[slot] for slot in sorted(slots)]
    mesh = _mesh(spec, min(request.dp, len(groups) * grouping.replicas))
    # A last group that is only partly needed (several replicas per node) still occupies its node.
    placements = _placements(nodes, mesh.world_size, spec.nproc_per_node)
    return Plan(mesh, placements, _reason(request, mesh, placements, moves))


def peers(placements: Sequence[Placement], zones: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The nodes that get a copy of each node's shards: mutual pairs across failure domains; an odd last node makes a ring of
    three. A single node has no peer.

    Stable: a swap within a failure domain changes only the pairs of the slot concerned.

    A replica in another domain that holds the same tensors does not count as the copy. A shard also has the rank's own state
    (random numbers, its position in the data), and a run that continued without it would not be the same run.
    """
    nodes = [p.node for p in sorted(placements, key=lambda p: (zones.get(p.node, ""), p.slot))]
    if len(nodes) < 2:
        return dict.fromkeys(nodes, ())
    half = len(nodes) // 2
    one_domain = len({zones.get(node, "") for node in nodes}) == 1
    # Sorted by domain: the node half a list away is in another domain unless one domain has more than half of the nodes.
    pairs = [(nodes[2 * i], nodes[2 * i + 1]) if one_domain else (nodes[i], nodes[i + half]) for i in range(half)]
    partner: dict[str, tuple[str, ...]] = {node: (other,) for pair in pairs for node, other in (pair, pair[::-1])}
    if len(nodes) % 2:
        first, second = pairs[-1]
        odd = nodes[-1]
        partner |= {first: (second,), second: (odd,), odd: (first,)}
    return partner


# ---------------------------------------------------------------- steps of a plan


def _with_holes_filled(request: Request, grouping: Grouping, wanted: int, pool: Mapping[str, Spare]) -> Plan | None:
    """The plan if all groups stay and there is a spare for each hole, as after the loss of a node. Looks only at groups with
    holes; the other placements are kept. None if this does not suffice."""
    spec, placements = request.spec, request.placements
    mesh = _mesh(spec, min(request.dp, wanted * grouping.replicas))
    if len(placements) != wanted * grouping.nodes or not _is_laid_out(placements, mesh.world_size, spec.nproc_per_node):
        return None
    holes = [place for place, each in enumerate(placements) if each.node in request.out]
    if len(holes) > len(pool):
        return None
    broken = sorted({grouping.place(slot, wanted)[0] for slot in holes})
    before = {
        group: [placements[grouping.slot(group, index, wanted)].node for index in range(grouping.nodes)]
        for group in broken
    }
    groups: dict[int, _Group] = {
        number: [None if node in request.out else node for node in group] for number, group in before.items()
    }
    moves = _fill(groups, wanted, before, dict(pool), request, grouping)
    filled = list(placements)
    for slot, node, _, _ in moves:
        filled[slot] = replace(placements[slot], node=node)
    return Plan(mesh, tuple(filled), _reason(request, mesh, tuple(filled), moves))


def _is_laid_out(placements: Sequence[Placement], world_size: int, width: int) -> bool:
    """Whether `_placements` would make these for this number of ranks, apart from the nodes. They are ordered by slot."""
    if len(placements) != -(-world_size // width):
        return False
    first, last = placements[0], placements[-1]
    return (
        (first.slot, first.first_rank, first.nproc) == (0, 0, min(width, world_size))
        and (last.slot, last.first_rank) == (len(placements) - 1, (len(placements) - 1) * width)
        and last.first_rank + last.nproc == world_size
    )


def _previous_groups(request: Request, grouping: Grouping) -> list[list[str]]:
    nodes = [p.node for p in sorted(request.placements, key=lambda p: p.slot)]
    count = len(nodes) // grouping.nodes
    return [[nodes[grouping.slot(group, index, count)] for index in range(grouping.nodes)] for group in range(count)]


def _holes(groups: Sequence[_Group]) -> int:
    return sum(node is None for group in groups for node in group)


def _drop_worst(groups: list[_Group]) -> list[str]:
    """Remove the group with the most holes (the last of equals); the last group moves into the gap. Returns its nodes."""
    worst = max(range(len(groups)), key=lambda index: (sum(node is None for node in groups[index]), index))
    dropped = groups[worst]
    last = groups.pop()
    if worst < len(groups):
        groups[worst] = last
    return [node for node in dropped if node is not None]


def _fill(
    groups: Mapping[int, _Group],
    count: int,
    before: Mapping[int, Sequence[str]],
    pool: dict[str, Spare],
    request: Request,
    grouping: Grouping,
) -> list[tuple[int, str, str, str]]:
    """Put spares into the holes of these of `count` groups. Returns (slot, node, previous node, why this node) for each."""
    zones, moves = request.zones, []
    pool = dict(sorted(pool.items(), key=lambda item: (item[1].repute, item[0])))  # the best first, for `_best`
    for group_index, group in groups.items():
        for index, occupant in enumerate(group):
            if occupant is not None:
                continue
            slot = grouping.slot(group_index, index, count)
            lost = before[group_index][index] if group_index in before else ""
            lost = lost if lost in request.out else ""
            zone = zones.get(lost) or next((zones[n] for n in group if n is not None and zones.get(n)), "")
            chosen = _best(pool, zone)
            del pool[chosen.node]
            group[index] = chosen.node
            why = f"in the same failure domain {zone}" if zone and chosen.zone == zone else "free"
            moves.append((slot, chosen.node, lost, why))
    return moves


def _best(pool: Mapping[str, Spare], zone: str) -> Spare:
    """Among the spares of the best repute, one of `zone` if that is known; then the first by name. `pool` has this order."""
    first = next(iter(pool.values()))
    equal = takewhile(lambda spare: spare.repute == first.repute, pool.values())
    return next((spare for spare in equal if not zone or spare.zone == zone), first)


def _placements(nodes: Sequence[str], world_size: int, width: int) -> tuple[Placement, ...]:
    needed = -(-world_size // width)
    return tuple(
        Placement(slot, node, slot * width, min(width, world_size - slot * width))
        for slot, node in enumerate(nodes[:needed])
    )


def _mesh(spec: JobSpec, dp: int) -> Mesh:
    return spec.mesh if dp == spec.mesh.dp else spec.mesh.resized(dp)


def _indivisible(request: Request, grouping: Grouping) -> str:
    spec, count = request.spec, grouping.replicas
    return (
        f"{spec.name} cannot run {request.dp} replicas: on nodes of {spec.nproc_per_node} workers replicas of the mesh "
        f"{spec.mesh} leave and return {count} at a time"
        + (
            ", all of them, because each node has ranks of all or is tied to those that have"
            if count == spec.mesh.dp
            else ""
        )
    )


def _shortage(request: Request, least: int, missing: int) -> str:
    kept = sum(p.node not in request.out for p in request.placements)
    at_least = "at least " if request.dp_min < request.dp else ""
    of_pool = f" of pool {request.spec.pool}" if request.spec.pool else ""
    there = kept + len(request.spares)
    return (
        f"{request.spec.name} needs {at_least}{plural(least, 'node')}{of_pool} with room for "
        f"{plural(request.spec.nproc_per_node, 'worker')}; {there} {'is' if there == 1 else 'are'} there, {missing} missing"
    )


def _reason(
    request: Request, mesh: Mesh, placements: tuple[Placement, ...], moves: Sequence[tuple[int, str, str, str]]
) -> str:
    if not request.placements:
        return f"first start: {mesh} on {plural(len(placements), 'node')}"
    old_dp = max(p.first_rank + p.nproc for p in request.placements) // mesh.replica_size
    parts = [f"{node} ({why}) takes slot {slot}" + (f" from {lost}" if lost else "") for slot, node, lost, why in moves]
    if mesh.dp != old_dp:
        parts.append(f"{plural(mesh.dp, 'replica')} instead of {old_dp}")
    return "; ".join(parts) if parts else "every node keeps its ranks"
