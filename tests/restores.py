"""The question that every restore election answers, put to the supervisor's and to the one of a launch without services.

A `Copy` is one copy of one shard on one node; `Asked` is everything that is known when the question comes up. Each elector says
the same thing in the words of its own module, and `Answer` is what the two are compared by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast import restore
from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.generations import Placement, RankRestore, RestorePoint, ShardKey, ShardRecord
from holdfast.domain.mesh import Mesh
from holdfast.supervisor.core.rules import election as supervisor
from holdfast.train.standalone import election as standalone

Fork = tuple[int, int]  # (attempt, step)


@dataclass(frozen=True, slots=True)
class Copy:
    step: int
    rank: int
    node: str
    attempt: int = 1
    tier: str = "disk"
    digest: str = ""  # "" = the one that all replicas of the rank's position have
    mesh: Mesh | None = None  # that saved it; None = the one that is asked about


@dataclass(frozen=True, slots=True)
class Asked:
    """`nodes[rank]` runs that rank now; `forks`: attempt → what it was forked from, attempts from step 0 left out."""

    copies: Sequence[Copy]
    saved_by: Mesh
    nodes: Sequence[str]
    mesh: Mesh
    forks: Mapping[int, Fork] = field(default_factory=dict)
    known: restore.Knowledge | None = (
        None  # of what only the supervisor has: an object store, doubts, a last verified step
    )

    def record(self, copy: Copy) -> ShardRecord:
        mesh = copy.mesh or self.saved_by
        digest = {"": f"{copy.step}@{mesh.position_of(copy.rank)}", "unknown": ""}.get(copy.digest, copy.digest)
        return ShardRecord(ShardKey(copy.attempt, copy.step, copy.rank), mesh, copy.tier, 1, digest)


@dataclass(frozen=True, slots=True)
class Answer:
    """By rank: the ranks whose shards it restores, and the node that it has each from. Nothing = from scratch."""

    at: Fork | None
    shards: tuple[tuple[int, ...], ...] = ()
    nearest: tuple[tuple[str, ...], ...] = ()
    reason: str = field(default="", compare=False)


class Elector(Protocol):
    def __call__(self, asked: Asked) -> Answer: ...


def _fork(asked: Asked, attempt: int) -> CheckpointId | None:
    return CheckpointId(*asked.forks[attempt]) if attempt in asked.forks else None


def by_supervisor(asked: Asked) -> Answer:
    """With the lineage as the supervisor records it: a branch at each start of a generation."""
    newest = max([copy.attempt for copy in asked.copies] + [1])
    lineage: tuple[restore.Segment, ...] = ()
    for attempt in range(1, newest + 1):
        lineage = restore.branch(lineage, attempt, RestorePoint(*asked.forks.get(attempt, (0, 0))), 64)
    elected = supervisor.elect(lineage, _holders(asked), asked.mesh, _placements(asked), asked.known)
    return _answer(elected, asked)


def by_launch(asked: Asked) -> Answer:
    """With the lineage as the shards name it. What only the supervisor knows is put to the rule on the launch's terms."""
    if asked.known is not None:
        lineage = restore.ancestry({copy.attempt: _fork(asked, copy.attempt) for copy in asked.copies} or {1: None})
        elected = restore.elect(lineage, _holders(asked), asked.mesh, _placements(asked), asked.known, standalone.TERMS)
        return _answer(elected, asked)
    seats = [standalone.Seat(node, f"disk of {node}") for node in asked.nodes]
    choice = standalone.elect([_holding(asked, copy) for copy in asked.copies], asked.mesh, seats)
    shards = tuple(tuple(part.key.rank for part in parts) for parts in choice.parts)
    nearest = tuple(tuple(part.place.removeprefix("disk of ") for part in parts) for parts in choice.parts)
    return Answer(choice.at, shards, nearest, choice.reason)


def _holding(asked: Asked, copy: Copy) -> standalone.Holding:
    record = asked.record(copy)
    path = f"/{copy.node}/{copy.tier}/a{copy.attempt}/s{copy.step}/{copy.rank}-{copy.digest}"
    place = copy.node if copy.tier == "memory" else f"disk of {copy.node}"
    fork = _fork(asked, copy.attempt)
    return standalone.Holding(record.key, record.mesh, fork, record.digest, copy.tier, path, place, holder=0)


def _holders(asked: Asked) -> list[restore.Holder]:
    held: dict[str, list[ShardRecord]] = defaultdict(list)
    for copy in asked.copies:
        held[copy.node].append(asked.record(copy))
    return [restore.Holder(node, f"{node}:1", "", tuple(held[node])) for node in sorted({*held, *asked.nodes})]


def _placements(asked: Asked) -> list[Placement]:
    return [Placement(rank, node, rank, 1) for rank, node in enumerate(asked.nodes)]


def _answer(elected: restore.Election, asked: Asked) -> Answer:
    if elected.mesh is None:
        return Answer(None, reason=elected.restore.reason)
    parts: list[list[RankRestore]] = [[] for _ in asked.nodes]
    for part in elected.ranks:
        parts[part.rank].append(part)
    shards = tuple(tuple(part.shard.rank for part in those) for those in parts)
    nearest = tuple(tuple(part.sources[0].node for part in those) for those in parts)
    return Answer((elected.restore.attempt, elected.restore.step), shards, nearest, elected.restore.reason)
