"""Generates hangs as flight recorders show them: every rank runs its program of collectives until no rank can continue.

A program contains the communication of a dp × pp × tp training step: forward and backward through the stages with messages
between them, a reduction in the tensor group for every layer, and one in the data group at the end. The operations of a rank
finish in order, each when all its members have entered it. Hosts run ahead of their devices by a few operations, as with NCCL,
or not at all, as with gloo. One fault is injected; the operations that then remain pending are the result.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from holdfast.domain.collectives import CollectiveRows, compact
from holdfast.domain.mesh import Mesh

WAYS = ("absent", "stalled device", "mismatch", "stopped", "network", "deadlock")
_STEPS, _MICROBATCHES, _LAYERS = 3, 2, 2
_FAULTS_UNTIL = 0.6  # share of the program in which the fault is injected: a rank at its end waits for no other rank

_GROUP_OF_PIPELINE = "pp"


@dataclass(frozen=True, slots=True)
class Op:
    """`members`: global ranks; for a message, sender and receiver. `turn`: number among the operations of these members."""

    group: str
    members: tuple[int, ...]
    turn: int
    kind: str


@dataclass(slots=True)
class Stuck:
    """The state when no rank can continue. `culprits` empty = no rank is expected to be named."""

    rows: CollectiveRows
    culprits: frozenset[int]
    silent: frozenset[int]  # ranks whose recorders do not answer
    counts: tuple[int, ...]  # operations entered by each rank


@dataclass(slots=True)
class _World:
    programs: list[list[Op]]
    ahead: int
    done: list[int] = field(default_factory=list)  # operations that the device of each rank has finished
    hosts_end: dict[int, int] = field(default_factory=dict)  # rank → first operation that its host does not enter
    shown_end: dict[int, int] = field(default_factory=dict)  # rank → first operation whose end is not recorded
    blocked: set[Op] = field(default_factory=set)

    def shown(self, rank: int) -> int:
        return min(self.done[rank], self.shown_end.get(rank, len(self.programs[rank])))

    def entered(self, rank: int) -> int:
        end = self.hosts_end.get(rank, len(self.programs[rank]))
        return max(self.shown(rank), min(end, self.shown(rank) + self.ahead))

    def head(self, rank: int) -> Op | None:
        return self.programs[rank][self.done[rank]] if self.done[rank] < self.entered(rank) else None

    def run(self) -> None:
        self.done = [0] * len(self.programs)
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.programs)):
                op = self.head(rank)
                while op is not None and op not in self.blocked and all(self.head(each) == op for each in op.members):
                    for each in op.members:
                        self.done[each] += 1
                    moved, op = True, self.head(rank)


def stuck(way: str, mesh: Mesh, rng: np.random.Generator) -> Stuck | None:
    """A job of `mesh` after a fault of this kind; None if the mesh has no place for such a fault."""
    programs = _programs(mesh)
    as_gloo = way == "deadlock" or (way != "stalled device" and rng.random() < 0.3)
    world = _World(programs, ahead=1 if as_gloo else int(rng.integers(2, 9)))
    culprit = int(rng.integers(mesh.world_size))
    place = _place(way, programs, culprit, rng)
    if place is None:
        return None
    op = programs[culprit][place]
    culprits, silent = frozenset({culprit}), frozenset[int]()
    match way:
        case "absent":
            world.hosts_end[culprit] = place
        case "stopped":
            world.hosts_end[culprit], silent = place, culprits
        case "stalled device":
            world.shown_end[culprit] = place
        case "network":
            world.blocked.add(op)
            culprits = frozenset()
        case "mismatch":
            other = Op(op.group, op.members, op.turn, "broadcast")
            world.blocked |= {op, other}
            programs[culprit][place] = other
            culprits = culprits if len(op.members) > 2 else frozenset()
        case "deadlock":
            for rank in (culprit, _across(mesh, culprit)):  # a single rank would only be late
                program = programs[rank]
                program[place], program[place + 1] = program[place + 1], program[place]
            culprits = frozenset()
    world.run()
    counts = tuple(world.entered(rank) for rank in range(len(programs)))
    return Stuck(_rows(world, silent), culprits, silent, counts)


def _across(mesh: Mesh, rank: int) -> int:
    """A rank of the same stage that shares neither the data group nor the tensor group."""
    size = dict(mesh.dims)
    d, p, t = rank // (size["pp"] * size["tp"]), rank // size["tp"] % size["pp"], rank % size["tp"]
    return ((d + 1) % size["dp"] * size["pp"] + p) * size["tp"] + (t + 1) % size["tp"]


def _place(way: str, programs: list[list[Op]], culprit: int, rng: np.random.Generator) -> int | None:
    """An operation of the culprit at which the fault can be injected."""
    program = programs[culprit][: int(_FAULTS_UNTIL * len(programs[culprit]))]
    if way == "mismatch":
        fits = [i for i, op in enumerate(program) if op.kind == "all_reduce"]
    elif way == "deadlock":  # two consecutive operations in different groups: their order decides which rank waits
        fits = [
            i for i, (op, after) in enumerate(pairwise(program))
            if op.kind == after.kind == "all_reduce" and op.group[0] == "t" and after.group[0] == "d"
        ]  # fmt: skip
    elif way == "stalled device":
        fits = [i for i, op in enumerate(program[:-1]) if op.kind == "all_reduce"]
    else:
        fits = list(range(len(program)))
    return int(rng.choice(fits)) if fits else None


def _programs(mesh: Mesh) -> list[list[Op]]:
    dp, pp, tp = (dict(mesh.dims)[name] for name in ("dp", "pp", "tp"))
    turns: dict[tuple[int, tuple[int, ...]], int] = defaultdict(int)
    programs: list[list[Op]] = [[] for _ in range(mesh.world_size)]

    def at(d: int, p: int, t: int) -> int:
        return (d * pp + p) * tp + t

    def call(rank: int, group: str, members: tuple[int, ...], kind: str) -> None:
        turns[rank, members] += 1
        programs[rank].append(Op(group, members, turns[rank, members], kind))

    for rank in range(mesh.world_size):
        d, p, t = rank // (pp * tp), rank // tp % pp, rank % tp
        for _ in range(_STEPS):
            for forward in (True, False):
                before, after = (p - 1, p + 1) if forward else (p + 1, p - 1)
                for _ in range(_MICROBATCHES):
                    if 0 <= before < pp:
                        call(rank, _GROUP_OF_PIPELINE, (at(d, before, t), rank), "message")
                    for _ in range(_LAYERS if tp > 1 else 0):
                        call(rank, f"tp{d}.{p}", tuple(at(d, p, i) for i in range(tp)), "all_reduce")
                    if 0 <= after < pp:
                        call(rank, _GROUP_OF_PIPELINE, (rank, at(d, after, t)), "message")
            if dp > 1:
                call(rank, f"dp{p}.{t}", tuple(at(i, p, t) for i in range(dp)), "all_reduce")
    return programs


def _rows(world: _World, silent: frozenset[int]) -> CollectiveRows:
    columns: dict[str, list[Any]] = defaultdict(list)

    def add(**row: Any) -> None:
        for name, value in row.items():
            columns[name].append(value)

    for rank, program in enumerate(world.programs):
        if rank in silent:
            continue
        entered, shown = world.entered(rank), world.shown(rank)
        groups: dict[str, list[Op]] = defaultdict(list)  # entered, by group
        members: dict[str, str] = {}
        for place, op in enumerate(program):
            if op.kind != "message":
                groups[op.group] += [op] if place < entered else []
                members[op.group] = compact(op.members)
        waiting = set(program[shown:entered])
        for name, ops in groups.items():
            left = [op for op in ops if op in waiting]
            add(rank=rank, group=name, members=members[name], kind=left[0].kind if left else "", sizes="Float[4]",
                peer=-1, entered=ops[-1].turn if ops else 0, pending=left[0].turn if left else -1)  # fmt: skip
        for op in program[shown:entered]:
            if op.kind == "message":
                sender, receiver = op.members
                add(rank=rank, group=op.group, members="", kind="send" if sender == rank else "recv", sizes="Float[4]",
                    peer=receiver if sender == rank else sender, entered=-1, pending=op.turn)  # fmt: skip
    return (
        CollectiveRows(**{name: tuple(column) for name, column in columns.items()})
        if columns
        else CollectiveRows.of(())
    )
