"""Shards and workers, as thousands of nodes report them at the same time: runs of ranks ↔ `ShardColumns` and `WorkerColumns`.

A column has one entry for each row, or a single one that holds for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.generations import ShardRecord
from holdfast.domain.nodes import RunningWorker
from holdfast.domain.runs import ShardRun, Shards, WorkerRun, Workers, full, short
from holdfast.v1 import control_pb2, types_pb2
from holdfast.wire.types import TIER_NAME, TIER_WIRE, decode_mesh, encode_mesh


def encode_shards(records: Sequence[ShardRecord]) -> types_pb2.ShardColumns:
    """There is at least one."""
    rows = (
        (each.key.attempt, each.key.step, each.key.rank, each.mesh, each.tier, each.size, each.digest, each.owner)
        for each in records
    )
    attempts, steps, ranks, mesh_of, tiers, sizes, digests, owner_of = zip(*rows, strict=True)
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
    """Raises `MalformedMessage` for columns of other lengths, for a digest with a comma, and for a mesh and a tier that are
    none."""
    ranks, sizes, digests = message.ranks[:], tuple(message.sizes[:]), message.digests[:]
    columns = (message.attempts[:], message.steps[:], message.mesh_of[:], message.tiers[:], message.owner_of[:])
    count = len(ranks)
    _check_lengths("shards", count, *columns, sizes, digests)
    meshes, owners = [decode_mesh(mesh, "shards.meshes") for mesh in message.meshes], message.owners[:]
    _, _, mesh_of, tiers, owner_of = columns
    for places, values in ((mesh_of, meshes), (owner_of, owners)):
        if (place := max(places, default=-1)) >= len(values):
            raise MalformedMessage("shards", f"{place} is not a place among {len(values)}")
    if unknown := set(tiers).difference(TIER_NAME):
        raise MalformedMessage("shards.tiers", f"{min(unknown)} is not a tier known here ({', '.join(TIER_WIRE)})")
    runs = []
    for begin, end in _runs(ranks, columns):
        a, s, m, t, o = [column[begin] if len(column) > 1 else column[0] for column in columns]
        size = sizes if len(sizes) == 1 else sizes[begin:end]
        digest = ",".join(digests[begin:end] if len(digests) == count else digests * (end - begin))
        run = ShardRun(a, s, meshes[m], TIER_NAME[t], owners[o], ranks[begin], end - begin, size, digest)
        if not run.fits:
            raise MalformedMessage("shards.digests", f"{digest!r} cannot be told apart")
        runs.append(run)
    return Shards(runs)


def encode_workers(workers: Sequence[RunningWorker]) -> control_pb2.WorkerColumns:
    return control_pb2.WorkerColumns(
        ranks=[worker.rank for worker in workers],
        jobs=short([worker.job for worker in workers]),
        generations=short([worker.generation for worker in workers]),
        pids=short([worker.pid for worker in workers]),
        since=short([worker.since for worker in workers]),
    )


def decode_workers(message: control_pb2.WorkerColumns) -> Workers:
    """Raises `MalformedMessage` for columns of other lengths, and for what is no time."""
    ranks, pids, since = message.ranks[:], tuple(message.pids[:]), tuple(message.since[:])
    jobs, generations = message.jobs[:], message.generations[:]
    count = len(ranks)
    _check_lengths("workers", count, jobs, generations, pids, since)
    if not all(map(math.isfinite, since)):
        raise MalformedMessage("worker.since", "not all are times")
    pids = full(pids, count)
    runs = []
    for begin, end in _runs(ranks, (jobs, generations)):
        job, generation = jobs[begin % len(jobs)], generations[begin % len(generations)]
        at = since if len(since) == 1 else since[begin:end]
        runs.append(WorkerRun(job, generation, ranks[begin], end - begin, pids[begin:end], at))
    return Workers(runs)


def _check_lengths(field: str, count: int, *columns: Sized) -> None:
    """Raises `MalformedMessage` unless each column has one entry for all rows, or one for each."""
    for column in columns:
        if len(column) != count and (len(column) != 1 or not count):
            raise MalformedMessage(field, f"{len(column)} entries for {count}")


def _runs(ranks: Sequence[int], columns: Iterable[Sequence[object]]) -> list[tuple[int, int]]:
    """Where each run begins and ends: ranks that follow each other, with equal values in all columns."""
    varying = [column for column in columns if len(column) > 1]
    if ranks and not varying and ranks == list(range(ranks[0], ranks[0] + len(ranks))):
        return [(0, len(ranks))]
    rows = list(zip(*varying, strict=True)) if varying else [()] * len(ranks)
    pairs = zip(ranks, ranks[1:], rows, rows[1:], strict=False)
    begins = [place for place, (rank, follower, had, has) in enumerate(pairs, 1) if rank + 1 != follower or had != has]
    return list(zip([0, *begins], [*begins, len(ranks)], strict=True)) if ranks else []
