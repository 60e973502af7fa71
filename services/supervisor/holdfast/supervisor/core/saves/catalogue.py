"""The saved steps of a job, as the API lists them: one entry per step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.evolve import evolve
from holdfast.domain.generations import ShardRecord
from holdfast.domain.mesh import Mesh
from holdfast.domain.tiers import DURABLE, NEARNESS
from holdfast.supervisor.core.binding import believed
from holdfast.supervisor.core.model.state import State
from holdfast.supervisor.core.rules.election import Line
from holdfast.supervisor.core.saves.pruning import is_needed


@dataclass(frozen=True, slots=True)
class SavedStep:
    """`ranks`: per tier of a node, the number of ranks whose shard a connected node holds there, their own node or a peer."""

    attempt: int
    step: int
    mesh: Mesh
    ranks: Mapping[str, int]
    stored: bool
    complete: bool
    newest: bool = False  # the newest complete one on the lineage
    needed: bool = False  # an unfinished job may restore it


@dataclass(slots=True)
class _Copies:
    mesh: Mesh
    stored: bool = False
    ranks: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # by tier


def saved_steps(state: State, name: str, *, away: bool = False) -> Sequence[SavedStep]:
    """Newest first. The job must exist. `away`: include shards that disconnected nodes held when they left."""
    job = state.jobs[name]
    found: dict[tuple[int, int], _Copies] = {}
    for _, record in _held(state, name, away):
        copies = found.setdefault((record.key.attempt, record.key.step), _Copies(record.mesh))
        copies.ranks[record.tier].add(record.key.rank)
    for stored in job.checkpoints.stored:
        found.setdefault((stored.attempt, stored.step), _Copies(stored.mesh)).stored = not stored.damage
    steps = [_step(key, found[key]) for key in sorted(found, reverse=True)]
    line = Line(job.checkpoints.lineage)
    newest = next((each for each in steps if each.complete and line.holds(each.attempt, each.step)), None)
    job_needs = ((each, is_needed(job, CheckpointId(each.attempt, each.step))) for each in steps)
    return [evolve(each, newest=each is newest, needed=needed) for each, needed in job_needs]


def holders(state: State, name: str, attempt: int, step: int, *, away: bool = False) -> Mapping[int, Sequence[str]]:
    """Connected nodes that hold each rank's shard of one saved step, in memory or on disk. `away`: as above."""
    found: dict[int, set[str]] = defaultdict(set)
    for node, record in _held(state, name, away):
        if (record.key.attempt, record.key.step) == (attempt, step):
            found[record.key.rank].add(node)
    return {rank: sorted(found[rank]) for rank in sorted(found)}


def unwritten(state: State, name: str, attempt: int, step: int) -> dict[str, int]:
    """Node → bytes of its shards of this step that are on the disk of no connected node, so that its disk must still take
    them."""
    held = [
        each for each in _held(state, name, away=False) if (each[1].key.attempt, each[1].key.step) == (attempt, step)
    ]
    written = {record.key.rank for _, record in held if record.tier in DURABLE}
    sizes: dict[str, int] = defaultdict(int)
    for node, record in held:
        if record.key.rank not in written:
            sizes[node] += record.size
    return dict(sorted(sizes.items()))


def _held(state: State, name: str, away: bool) -> Iterator[tuple[str, ShardRecord]]:
    """(node, shard) for all shards of the job that connected nodes hold."""
    nodes = [node for node in state.nodes.values() if name in node.inventory and (node.connected or away)]
    for node, shards in zip(nodes, believed(state.jobs[name], nodes, state.nodes), strict=True):
        for record in shards:
            yield node.name, record


def _step(key: tuple[int, int], copies: _Copies) -> SavedStep:
    everywhere = set().union(*copies.ranks.values())
    return SavedStep(
        attempt=key[0],
        step=key[1],
        mesh=copies.mesh,
        ranks={tier: len(copies.ranks[tier]) for tier in NEARNESS},
        stored=copies.stored,
        complete=copies.stored or len(everywhere) == copies.mesh.world_size,
    )
