"""Shards and workers in columns, as thousands of nodes report them at the same time ↔ `ShardColumns` and `WorkerColumns`.

A column has one entry for each row, or a single one that holds for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TypeVar

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.generations import ShardRecord, Shards, rows_of
from holdfast.domain.nodes import RunningWorker
from holdfast.v1 import control_pb2, types_pb2
from holdfast.wire.columns import short
from holdfast.wire.types import TIER_NAME, TIER_WIRE, decode_mesh, encode_mesh

T = TypeVar("T")


def encode_shards(records: Sequence[ShardRecord]) -> types_pb2.ShardColumns:
    """There is at least one."""
    attempts, steps, ranks, mesh_of, tiers, sizes, digests, owner_of = zip(*rows_of(records), strict=True)
    meshes = {mesh: place for place, mesh in enumerate(dict.fromkeys(mesh_of))}
    owners = {owner: place for place, owner in enumerate(dict.fromkeys(owner_of))}
    return types_pb2.ShardColumns(
        ranks=ranks,
        attempts=short(attempts),
        steps=short(steps),
        meshes=[encode_mesh(mesh) for mesh in meshes],
        mesh_of=short([meshes[mesh] for mesh in mesh_of]),
        tiers=short([TIER_WIRE[tier] for tier in tiers]),
        sizes=short(sizes),
        digests=short(digests),
        owners=list(owners),
        owner_of=short([owners[owner] for owner in owner_of]),
    )


def decode_shards(message: types_pb2.ShardColumns) -> Shards:
    """Raises `MalformedMessage` for columns of other lengths, and for a mesh and a tier that are none."""
    count, field = len(message.ranks), "shards"
    if unknown := set(message.tiers) - TIER_NAME.keys():
        raise MalformedMessage("shards.tiers", f"{min(unknown)} is not a tier known here ({', '.join(TIER_WIRE)})")
    rows = zip(
        _column(message.attempts, count, field),
        _column(message.steps, count, field),
        message.ranks,
        _of(message.mesh_of, [decode_mesh(mesh, "shards.meshes") for mesh in message.meshes], count, field),
        _column([TIER_NAME[tier] for tier in message.tiers], count, field),
        _column(message.sizes, count, field),
        _column(message.digests, count, field),
        _of(message.owner_of, message.owners, count, field),
        strict=False,  # columns of one entry go on for ever
    )
    return Shards(rows)


def encode_workers(workers: Sequence[RunningWorker]) -> control_pb2.WorkerColumns:
    return control_pb2.WorkerColumns(
        ranks=[worker.rank for worker in workers],
        jobs=short([worker.job for worker in workers]),
        generations=short([worker.generation for worker in workers]),
        pids=short([worker.pid for worker in workers]),
        since=short([worker.since for worker in workers]),
    )


def decode_workers(message: control_pb2.WorkerColumns) -> tuple[RunningWorker, ...]:
    """Raises `MalformedMessage` for columns of other lengths, and for what is no time."""
    count, field = len(message.ranks), "workers"
    jobs, generations = _column(message.jobs, count, field), _column(message.generations, count, field)
    pids, since = _column(message.pids, count, field), _column(message.since, count, field)
    if not all(map(math.isfinite, message.since)):
        raise MalformedMessage("worker.since", "not all are times")
    return tuple(map(RunningWorker, jobs, generations, message.ranks, pids, since))


def _column(values: Sequence[T], count: int, field: str) -> Iterable[T]:
    """The entries of a column. Raises `MalformedMessage` unless it has one for all, or one for each."""
    if len(values) == count:
        return values
    if len(values) == 1:
        return repeat(values[0], count)
    raise MalformedMessage(field, f"{len(values)} entries for {count}")


def _of(places: Sequence[int], values: Sequence[T], count: int, field: str) -> Iterable[T]:
    if places and max(places) >= len(values):
        raise MalformedMessage(field, f"{max(places)} is not a place among {len(values)}")
    return _column([values[place] for place in places], count, field)
