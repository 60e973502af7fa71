"""The selection of a checkpoint; its theory is in the docstring of the package."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from operator import lt
from typing import NamedTuple, assert_never

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.construct import constructor_of
from holdfast.domain.generations import (
    OBJECT_STORE,
    Placement,
    RestorePoint,
    RestoreRun,
    ShardKey,
    ShardSource,
    StoredStep,
)
from holdfast.domain.mesh import Mesh
from holdfast.domain.runs import ShardRun, shard_runs
from holdfast.domain.tiers import DURABLE, NEARNESS
from holdfast.restore.lineage import Line, Segment
from holdfast.restore.values import Election, Holder, Knowledge, ObjectStore, Origin, Terms

REASONS_MAX = 3

_shard_key, _restore_run, _shard_source = map(constructor_of, (ShardKey, RestoreRun, ShardSource))


def elect(
    lineage: Sequence[Segment],
    holders: Iterable[Holder],
    mesh: Mesh,
    placements: Sequence[Placement],
    known: Knowledge | None = None,
    terms: Terms | None = None,
) -> Election:
    """Return the newest complete step on the lineage, and for each rank of `mesh` the sources of its shards, nearest first."""
    known, terms = known or Knowledge(), terms or Terms()
    holders = sorted(holders, key=lambda holder: holder.node)
    zones = {holder.node: holder.zone for holder in holders}
    sources = {holder.node: _shard_source(holder.node, holder.endpoint, "") for holder in holders}
    steps = _on_lineage(lineage, holders, known.origin, known.store)
    newest_first = [steps[age] for age in sorted(steps, reverse=True)]
    refused: list[str] = []
    for last_resort in (False, True) if terms.substitutes else (False,):
        for saved in newest_first:
            need = _doubt(saved, known) or _need(saved, mesh, known, terms, newest_first, last_resort=last_resort)
            found = need if isinstance(need, str) else _cover(saved, need, placements, zones, sources, known.mounts)
            if not isinstance(found, str):
                return _elected(saved, found, mesh, refused)
            if not last_resort:
                refused.append(f"step {saved.step} of attempt {saved.attempt}: {found}")
    if refused:
        return Election(
            RestorePoint(reason=f"no saved step is complete: start from step 0 ({'; '.join(refused[:REASONS_MAX])})")
        )
    return Election(RestorePoint())


# ---------------------------------------------------------------- what was saved


_Copy = tuple[Holder, ShardRun]
_Blocks = Mapping[int, Sequence[_Copy]]  # by first rank: all copies of consecutive ranks, each of all of these ranks


@dataclass(slots=True)
class _Saved:
    """One saved step: the nodes that have its shards, and the object store that has it."""

    attempt: int
    step: int
    held: dict[tuple[int, ...], list[_Copy]] = field(default_factory=dict)  # by first rank and number of ranks
    stored: StoredStep | None = None
    store: tuple[ShardSource, ...] = ()  # the store with all of its shards; empty = in no store, or damaged there
    held_meshes: dict[Mesh, None] = field(default_factory=dict)  # in `held`

    @property
    def meshes(self) -> list[Mesh]:
        """The meshes in the shards of this step. More than one is an error."""
        return list(({self.stored.mesh: None} if self.stored else {}) | self.held_meshes)

    @property
    def runs(self) -> Iterator[ShardRun]:
        return (run for copies in self.held.values() for _, run in copies)

    def blocks(self, places: Iterable[tuple[int, int]] | None = None) -> _Blocks:
        """Return the copies, with runs cut at the limits of `places` (first rank, number of ranks), and where other runs begin
        or end; None = one block per rank."""
        known, limits = {*places} if places is not None else set(), self.held.keys()
        if limits <= known:  # nearly always
            return {begin: copies for (begin, _), copies in self.held.items()}
        if places is None:
            ends = {rank for begin, width in limits for rank in range(begin, begin + width + 1)}
        else:
            ends = {rank for begin, width in chain(known, limits) for rank in (begin, begin + width)}
        following = dict(pairwise(sorted(ends)))
        blocks: dict[int, list[_Copy]] = defaultdict(list)
        for (begin, width), copies in self.held.items():
            if following[begin] == begin + width:
                blocks[begin] += copies
                continue
            last = begin + width
            while begin < last:
                end = following[begin]
                blocks[begin] += [(holder, run.part(begin, end)) for holder, run in copies]
                begin = end
        return blocks


def _on_lineage(
    lineage: Iterable[Segment], holders: Iterable[Holder], *stores: ObjectStore
) -> dict[CheckpointId, _Saved]:
    line = Line(lineage)
    of_runs: dict[tuple[int, ...], _Saved | None] = {}  # None = not on the lineage
    last: tuple[int, ...] = ()
    saved: _Saved | None = None
    held: dict[tuple[int, ...], list[_Copy]] = {}
    mesh: Mesh | None = None
    for holder in holders:
        for run in shard_runs(holder.shards):
            if (age := run[:2]) != last:  # nearly all runs are of the same few steps
                last, mesh = age, None
                if age not in of_runs:
                    of_runs[age] = _Saved(*age) if line.holds(*age) else None
                if (saved := of_runs[age]) is not None:
                    held = saved.held
            if saved is None:
                continue
            if run[2] is not mesh:
                mesh = run[2]
                saved.held_meshes[mesh] = None
            if (copies := held.get(limits := run[5:7])) is None:
                held[limits] = [(holder, run)]
            else:
                copies.append((holder, run))
    steps = {CheckpointId(each.attempt, each.step): each for each in of_runs.values() if each is not None}
    for store in stores:
        for stored in store.steps if store.url else ():
            age = CheckpointId(stored.attempt, stored.step)
            if line.holds(*age):
                saved = steps.setdefault(age, _Saved(*age))
                saved.stored = stored
                saved.store = () if stored.damage else (ShardSource(OBJECT_STORE, store.url, store.job),)
    return steps


def replicas_differ(runs: Iterable[ShardRun]) -> bool:
    """Whether these shards of one step prove that its state is sharded over dp: equal positions with different tensors."""
    return _seen_sharded(runs) is True


def _seen_sharded(runs: Iterable[ShardRun]) -> bool | None:
    """Whether the replicas of one step have different tensors at a position; None = no two shards can be compared."""
    seen: dict[int, tuple[str, int]] = {}  # by position: a digest, and the rank that has it
    firsts: dict[int, tuple[str, int]] = {}  # by positions: the digests and the first rank of the first run
    alike, mesh, last, digests = None, None, -1, ""
    for run in runs:
        if run[5] == last and run[8] is digests and run[2] is mesh:
            continue  # the same shards in another tier of the node
        last, digests = run[5], run[8]
        if run[2] is not mesh:
            mesh, place_of = run[2], _places(run[2])
        known, first = firsts.setdefault(place_of(run), (digests, last))
        if known == digests and first != last and digests.strip(","):
            alike = False  # equal to a run of another replica
        else:
            for rank, found in enumerate(digests.split(","), last):
                if not found:
                    continue
                digest, other = seen.setdefault(run.mesh.position_of(rank), (found, rank))
                if digest != found:
                    return True
                if other != rank:
                    alike = False
    return alike


def _places(mesh: Mesh) -> Callable[[ShardRun], int]:
    """Return a function that maps a run of this mesh to a number. Runs of equal width have equal numbers if their ranks have
    pairwise equal positions. If that is not certain, the number is negative and unique."""
    stride, row, in_blocks = mesh.stride, mesh.stride * mesh.dp, mesh.is_dp_outermost

    def place_of(run: ShardRun) -> int:
        rank = run[5]
        inside = rank % stride
        return rank // row * stride + inside if in_blocks or inside + run[6] <= stride else -1 - rank

    return place_of


# ---------------------------------------------------------------- which shards each rank needs


@dataclass(frozen=True, slots=True)
class _Own:
    """Each rank needs its own shard."""


@dataclass(frozen=True, slots=True)
class _Any:
    """Each rank needs the shard of any replica at its position, because all replicas have equal tensors."""

    before: Mesh
    mesh: Mesh
    own_first: bool = False  # the rank's own shard even if another replica's is nearer


@dataclass(frozen=True, slots=True)
class _Parts:
    """Each rank needs the shards of all replicas at its position. `unseen`: the reason, if it is not known that they differ."""

    before: Mesh
    mesh: Mesh
    unseen: str = ""


@dataclass(frozen=True, slots=True)
class _All:
    """Each rank needs every shard."""

    world_size: int


_Need = _Own | _Any | _Parts | _All


def _doubt(saved: _Saved, known: Knowledge) -> str:
    """Return why the step must not be restored even if it is complete; "" if there is no such reason."""
    if known.trusted is not None and saved.step > known.trusted.step:
        return f"after step {known.trusted.step}, the last one that was verified ({known.trusted.reason})"
    return known.doubts.get(CheckpointId(saved.attempt, saved.step), "")


def _need(
    saved: _Saved, mesh: Mesh, known: Knowledge, terms: Terms, steps: Iterable[_Saved], *, last_resort: bool
) -> _Need | str:
    """Return the shards of the step that the ranks of `mesh` need, or why the step cannot be used."""
    before, *others = saved.meshes
    if others:
        return "its shards come from different meshes"
    if before.resized(1) != mesh.resized(1):
        if terms.any_mesh and not last_resort:
            return _All(before.world_size)
        return f"it was saved by the mesh {before}, and only the number of replicas may change"
    if before.dp == mesh.dp and not last_resort:
        return _Own()
    if before.dp == 1:
        return _Any(before, mesh)
    match _sharded(saved, known, steps):
        case True:
            need: _Any | _Parts = _Parts(before, mesh)
        case False:
            need = _Any(before, mesh, own_first=last_resort)
        case None:
            unseen = (
                f"it was saved by {before.dp} replicas, and too few of its shards are known to tell whether each of them "
                "held all of the state"
            )
            need = _Parts(before, mesh, unseen)
        case never:
            assert_never(never)
    return "no replica is known to hold all of the state" if last_resort and isinstance(need, _Parts) else need


def _sharded(saved: _Saved, known: Knowledge, steps: Iterable[_Saved]) -> bool | None:
    """Whether the state of the step is sharded over dp; None = not known. The step's own shards take precedence over other
    steps of the attempt. Other attempts are ignored, because the script may have changed between attempts."""
    seen = _seen_sharded(saved.runs)
    if known.sharded or (saved.stored is not None and saved.stored.sharded) or seen:
        return True
    if seen is False or known.sharded is False or saved.stored is not None:
        return False
    same = [other for other in steps if other.attempt == saved.attempt and other is not saved]
    found = {_seen_sharded(other.runs) for other in same}
    return True if True in found else False if False in found else None


# ---------------------------------------------------------------- where they are


_Pick = tuple[RestoreRun, Origin]
# For one restoring node: (node, tier) of each copy of a shard → all sources, nearest first, and the origin of the nearest one.
_Patterns = dict[tuple[tuple[str, str], ...], tuple[tuple[ShardSource, ...], Origin]]


def _cover(
    saved: _Saved,
    need: _Need,
    placements: Sequence[Placement],
    zones: Mapping[str, str],
    sources_of: Mapping[str, ShardSource],
    mounts: Mapping[str, str],
) -> list[_Pick] | str:
    """Return the shards that every rank restores, or why that is not possible. Ranks that restore their own shards are
    processed in runs."""
    places = [(place.first_rank, place.nproc) for place in placements]
    blocks = saved.blocks(places if isinstance(need, _Own) else None)
    wanted_by = _chooser(need, blocks, zones, mounts)
    picks: list[_Pick] = []
    for placement in placements:
        node, rank = placement.node, placement.first_rank
        end = rank + placement.nproc
        own, zone = _own(node, mounts) if mounts else (node,), zones.get(node, "")
        patterns: _Patterns = {}
        while rank < end:
            count = 1
            for wanted in wanted_by(rank, node):
                copies = blocks.get(wanted, ())
                if not copies and not saved.store:
                    return _missing(saved, need, wanted)
                digests = _agreed([run[8] for _, run in copies], wanted)
                roots = _agreed([text for _, run in copies if (text := run[9])], wanted)
                if isinstance(digests, str):
                    return digests
                if isinstance(roots, str):
                    return roots
                if rank + len(digests) == end and not patterns:  # nearly always: no other shard of this node follows
                    found = _sources(copies, own, zone, sources_of, saved.store)
                else:
                    pattern = tuple([(holder.node, run.tier) for holder, run in copies])
                    if (known_sources := patterns.get(pattern)) is None:
                        known_sources = patterns[pattern] = _sources(copies, own, zone, sources_of, saved.store)
                    found = known_sources
                sources, origin = found
                key = _shard_key(saved.attempt, saved.step, wanted)
                picks.append((_restore_run(rank, key, digests, sources, (), roots if any(roots) else ()), origin))
                count = len(digests)
            rank += count
    ranks = [restore.rank for restore, _ in picks]
    if isinstance(need, _Own) and all(map(lt, ranks, ranks[1:])):
        return picks  # nearly always
    return sorted(picks, key=lambda pick: (pick[0].rank, pick[0].shard.rank))


def _agreed(known: Sequence[str], first: int) -> tuple[str, ...] | str:
    """Combine what copies of the same shards are known by: digests, or roots. Returns one for each rank from `first` on ("" =
    not known), or why these copies cannot be of the same shards."""
    if known and known.count(known[0]) == len(known):
        return tuple(known[0].split(","))
    agreed = []
    for rank, found in enumerate(zip(*[each.split(",") for each in dict.fromkeys(known)], strict=True), first):
        several = set(found) - {""}
        if len(several) > 1:
            return f"{len(several)} different shards of rank {rank} exist"
        agreed.append(several.pop() if several else "")
    return tuple(agreed) or ("",)


def _chooser(
    need: _Need, blocks: Mapping[int, Sequence[_Copy]], zones: Mapping[str, str], mounts: Mapping[str, str]
) -> Callable[[int, str], Sequence[int]]:
    """Return a function that maps a rank and its node to the ranks whose shards it restores."""
    match need:
        case _Own():
            return lambda rank, _: (rank,)
        case _Any():
            return _Nearest(blocks, need, zones, mounts).to
        case _Parts(before, mesh):
            return lambda rank, _: before.ranks_at(mesh.position_of(rank))
        case _All(world_size):
            return lambda *_: range(world_size)
        case never:
            assert_never(never)


class _Copied(NamedTuple):
    """A copy on a known node. Ordered: the nearest tier first (`NEARNESS`)."""

    nearness: int
    rank: int


class _Best(NamedTuple):
    """The best copy of a failure domain, or of all nodes. Ordered: the nearest tier first (`NEARNESS`)."""

    nearness: int
    node: str
    rank: int


class _Nearest:
    """Chooses the shard for a rank if the shard of any replica at its position is suitable. Uses lookup tables, because a
    position may have thousands of copies."""

    def __init__(
        self, by_rank: Mapping[int, Sequence[_Copy]], need: _Any, zones: Mapping[str, str], mounts: Mapping[str, str]
    ) -> None:
        self._by_rank, self._need, self._zones, self._mounts = by_rank, need, zones, mounts
        self._on: dict[tuple[int, str], list[_Copied]] = defaultdict(list)  # by position and node
        self._in: dict[tuple[int, str], _Best] = {}  # by position and zone
        self._anywhere: dict[int, _Best] = {}  # by position
        for rank, copies in by_rank.items():
            position = need.before.position_of(rank)
            for (node, _, zone, _), run in copies:
                tier = NEARNESS.get(run.tier, len(NEARNESS))
                self._on[position, node].append(_Copied(tier, rank))
                best = _Best(tier, node, rank)
                self._in[position, zone] = min(best, self._in.get((position, zone), best))
                self._anywhere[position] = min(best, self._anywhere.get(position, best))

    def to(self, rank: int, node: str) -> tuple[int]:
        before, mesh = self._need.before, self._need.mesh
        position, replica = mesh.position_of(rank), mesh.replica_of(rank)
        own = before.ranks_at(position)[replica] if replica < before.dp else -1  # -1: a new replica has no own shard
        if self._need.own_first and own in self._by_rank:
            return (own,)
        here = [item for holder in _own(node, self._mounts) for item in self._on.get((position, holder), ())]
        if here:
            return (min(here, key=lambda copy: (copy.rank != own, *copy)).rank,)
        if own in self._by_rank:
            return (own,)
        best = self._in.get((position, self._zones.get(node, ""))) or self._anywhere.get(position)
        return (best.rank if best is not None else before.ranks_at(position)[0],)


def _own(node: str, mounts: Mapping[str, str]) -> tuple[str, ...]:
    """Return the holders whose shards `node` can read directly."""
    return (node, mounts[node]) if node in mounts else (node,)


def _missing(saved: _Saved, need: _Need, rank: int) -> str:
    if isinstance(need, _Parts) and need.unseen:
        return need.unseen
    damaged = f"; in the object store, {saved.stored.damage}" if saved.stored else ""
    return f"no connected node holds the shard of rank {rank}{damaged}"


def _sources(
    copies: Sequence[_Copy],
    own: tuple[str, ...],
    zone: str,
    sources_of: Mapping[str, ShardSource],
    store: tuple[ShardSource, ...],
) -> tuple[tuple[ShardSource, ...], Origin]:
    """Return all sources of one shard: the own node first (memory before disk), then its failure domain, the other nodes, and
    the object store."""
    if not copies:
        return store, Origin.STORE
    farthest = len(NEARNESS)
    near = NEARNESS.get
    ordered = [
        (node not in own, there != zone, near(tier := run[3], farthest), node, tier)
        for (node, _, there, _), run in copies
    ]
    ordered.sort()
    sources = dict.fromkeys([each[3] for each in ordered])
    elsewhere, _, _, _, tier = ordered[0]
    origin = Origin.PEER if elsewhere else Origin.DISK if tier in DURABLE else Origin.MEMORY
    return (*[sources_of[node] for node in sources], *store), origin


# ---------------------------------------------------------------- the answer


def _elected(saved: _Saved, picks: list[_Pick], mesh: Mesh, refused: Sequence[str]) -> Election:
    numbers: Counter[Origin] = Counter()
    for restore, origin in picks:
        numbers[origin] += len(restore.digests)
    reason = (
        f"step {saved.step} of attempt {saved.attempt} is the newest that is complete on all {mesh.world_size} ranks, "
        f"{_where_from(numbers)}"
    )
    [before] = saved.meshes
    restored = numbers.total()
    in_parts = restored > mesh.world_size
    same_positions = before.resized(1) == mesh.resized(1)
    if in_parts:
        whose = "replicas" if same_positions else "ranks"
        reason += f"; each rank's part is put together from those of {restored // mesh.world_size} {whose}"
    elif (
        same_positions
        and before.dp == mesh.dp
        and (lost := sum(restore.shard.rank != restore.rank for restore, _ in picks))
    ):
        reason += f"; another replica's identical state stands in for {lost} {'shard' if lost == 1 else 'shards'}"
    if refused:
        reason += f" (skipped: {'; '.join(refused[:REASONS_MAX])})"
    return Election(
        RestorePoint(saved.attempt, saved.step, reason),
        before,
        tuple([restore for restore, _ in picks]),
        max(numbers),
        in_parts,
    )


def _where_from(numbers: Counter[Origin]) -> str:
    """`numbers`: of restored shards, by origin."""
    if len(numbers) == 1:
        [origin] = numbers
        return f"each from {origin}" if numbers.total() > 1 else f"from {origin}"
    return ", ".join(f"{numbers[origin]} from {origin}" for origin in sorted(numbers))
