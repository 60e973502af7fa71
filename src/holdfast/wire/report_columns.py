"""Reports of shards and workers, which thousands of nodes send at the same time: runs of ranks ↔ `ShardColumns` and
`WorkerColumns`.

Shards are written as blocks and their shape (docs/adr/0092). Agents of earlier versions write runs, or columns. A column has
one entry for each row, or a single entry that applies to all rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Sized
from functools import lru_cache, partial
from itertools import chain
from typing import Any, TypeVar

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.generations import ShardPlace, ShardRecord
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import RunningWorker
from holdfast.domain.runs import (
    PlaceRun,
    Places,
    ShardRun,
    Shards,
    WorkerRun,
    Workers,
    full,
    place_runs,
    shard_runs,
    short,
    worker_runs,
)
from holdfast.v1 import control_pb2, types_pb2
from holdfast.wire.types import TIER_NAME, TIER_WIRE, decode_mesh, encode_mesh, parse

T = TypeVar("T")

# Made from one tuple of all values, in half of the time that the class takes: each save has 37,500 runs.
_shard_run: Callable[[tuple[Any, ...]], ShardRun] = partial(tuple.__new__, ShardRun)
_worker_run: Callable[[tuple[Any, ...]], WorkerRun] = partial(tuple.__new__, WorkerRun)


def _decode_runs(message: types_pb2.ShardColumns) -> Shards:
    if message.ranks:
        raise MalformedMessage("shards", "rows and runs in one report")
    meshes, owners = [decode_mesh(mesh, "shards.meshes") for mesh in message.meshes], message.owners[:]
    runs: list[ShardRun] = []
    digests, roots = "", ""
    for each in message.runs:
        # A node's memory and its disk have the same shards: keep one copy of equal texts.
        digests = digests if (read := each.digests) == digests else read
        roots = roots if (read := each.roots) == roots else read
        width, sizes = each.width, each.sizes[:]
        try:
            mesh, tier, owner = meshes[each.mesh], TIER_NAME[each.tier], owners[each.owner]
        except (IndexError, KeyError):
            raise MalformedMessage(
                "shards.runs",
                f"the run of rank {each.rank} has a mesh, an owner or a tier that is not known ({', '.join(TIER_WIRE)})",
            ) from None
        commas, count = width - 1, len(sizes)
        if digests.count(",") != commas or (count != 1 and count != width) or (roots and roots.count(",") != commas):
            raise MalformedMessage("shards.runs", f"the run of rank {each.rank} has not {width} values of each kind")
        runs.append(
            _shard_run((each.attempt, each.step, mesh, tier, owner, each.rank, width, tuple(sizes), digests, roots))
        )
    return Shards(runs)


def encode_shards(records: Sequence[ShardRecord]) -> types_pb2.ShardColumns:
    """Encode shards as blocks and their shape; requires at least one."""
    try:
        runs = shard_runs(records)
    except (
        ValueError
    ):  # A digest has a comma. It comes from a file and must not end the session: the receiver refuses it.
        runs = tuple(map(_run_of_one, records))
    blocks: list[tuple[Any, ...]] = []
    times: Counter[tuple[Any, ...]] = Counter()
    for run in runs:
        block = (run.rank, run.owner, run.digests, run.roots, run.attempt, run.step)
        times[*block, run.tier] += 1  # more than 1: two shards in one place
        blocks.append((*block, times[*block, run.tier]))
    places = {block: place for place, block in enumerate(dict.fromkeys(blocks))}
    meshes = {mesh: place for place, mesh in enumerate(dict.fromkeys(run.mesh for run in runs))}
    shape = types_pb2.ShardShape(
        meshes=[encode_mesh(mesh) for mesh in meshes],
        runs=[
            types_pb2.ShapedRun(
                block=places[block],
                attempt=run.attempt,
                step=run.step,
                mesh=meshes[run.mesh],
                tier=TIER_WIRE[run.tier],
                width=run.width,
                sizes=run.sizes,
            )
            for run, block in zip(runs, blocks, strict=True)
        ],
    )
    ranks, owners, digests, roots, *_ = zip(*places, strict=True)
    return types_pb2.ShardColumns(
        shape=shape.SerializeToString(deterministic=True), ranks=ranks, owners=owners, digests=digests, roots=roots
    )


def _run_of_one(shard: ShardRecord) -> ShardRun:
    key, size = shard.key, (shard.size,)
    of_one = (shard.mesh, shard.tier, shard.owner, key.rank, 1, size, shard.digest, shard.root)
    return ShardRun(key.attempt, key.step, *of_one)


_ShapedRun = tuple[int, int, int, Mesh, str, int, tuple[int, ...]]  # the fields of the message


def _shape_of(raw: bytes) -> tuple[_ShapedRun, ...]:
    message = parse(types_pb2.ShardShape, raw)
    meshes, runs = [decode_mesh(mesh, "shards.meshes") for mesh in message.meshes], []
    for each in message.runs:
        if each.mesh >= len(meshes) or each.tier not in TIER_NAME:
            known = ", ".join(TIER_WIRE)
            raise MalformedMessage("shards.shape", f"a run has a mesh or a tier that is not known ({known})")
        if len(each.sizes) not in (1, each.width):
            raise MalformedMessage("shards.shape", f"a run has {len(each.sizes)} sizes for {each.width} ranks")
        mesh, tier = meshes[each.mesh], TIER_NAME[each.tier]
        runs.append((each.block, each.attempt, each.step, mesh, tier, each.width, tuple(each.sizes)))
    if any(count > len(TIER_WIRE) for count in Counter(place for place, *_ in runs).values()):
        # The supervisor stores a block with each of its runs: a small report must not make it store gigabytes.
        raise MalformedMessage("shards.shape", f"more than {len(TIER_WIRE)} runs share a block")
    return tuple(runs)


SHAPES_MAX, SHAPE_BYTES_MAX = 256, 4096  # cached shapes, and the largest of them
_known_shape = lru_cache(SHAPES_MAX)(_shape_of)


def _decode_blocks(message: types_pb2.ShardColumns) -> Shards:
    raw = message.shape
    shape = _known_shape(raw) if len(raw) <= SHAPE_BYTES_MAX else _shape_of(raw)
    ranks, owners, digests, roots = message.ranks[:], message.owners[:], message.digests[:], message.roots[:]
    if not len(ranks) == len(owners) == len(digests) == len(roots):
        raise MalformedMessage(
            "shards", f"{len(owners)} owners, {len(digests)} digests, {len(roots)} roots for {len(ranks)}"
        )
    runs: list[ShardRun] = []
    for place, attempt, step, mesh, tier, width, sizes in shape:
        if place >= len(ranks):
            raise MalformedMessage("shards.shape", f"{place} is not a place among {len(ranks)} blocks")
        known, root, commas = digests[place], roots[place], width - 1
        if known.count(",") != commas or (root and root.count(",") != commas):
            raise MalformedMessage("shards", f"the block of rank {ranks[place]} has not {width} values of each kind")
        runs.append(_shard_run((attempt, step, mesh, tier, owners[place], ranks[place], width, sizes, known, root)))
    return Shards(runs)


def decode_shards(message: types_pb2.ShardColumns) -> Shards:
    """Decode shards, in columns, runs or blocks. Raises `MalformedMessage` for columns of unequal length, for a digest or root
    with a comma, and for an invalid mesh or tier."""
    if message.shape:
        return _decode_blocks(message)
    if message.runs:
        return _decode_runs(message)
    ranks, sizes, digests, roots = message.ranks[:], tuple(message.sizes[:]), message.digests[:], message.roots[:]
    attempts, steps, mesh_of = message.attempts[:], message.steps[:], message.mesh_of[:]
    tiers, owner_of = message.tiers[:], message.owner_of[:]
    columns = (attempts, steps, mesh_of, tiers, owner_of)
    count = len(ranks)
    _check_lengths("shards", count, *columns, sizes, digests, *([roots] if roots else []))
    meshes, owners = [decode_mesh(mesh, "shards.meshes") for mesh in message.meshes], message.owners[:]
    for places, values in ((mesh_of, meshes), (owner_of, owners)):
        if (place := max(places, default=-1)) >= len(values):
            raise MalformedMessage("shards", f"{place} is not a place among {len(values)}")
    if unknown := set(tiers).difference(TIER_NAME):
        raise MalformedMessage("shards.tiers", f"{min(unknown)} is not a tier known here ({', '.join(TIER_WIRE)})")
    for name, texts in (("digests", digests), ("roots", roots)):
        if "," in "".join(texts):
            wrong = next(text for text in texts if "," in text)
            raise MalformedMessage(f"shards.{name}", f"{wrong!r} contains a comma, which separates {name}")
    attempt_of, step_of = _of_each(attempts, count), _of_each(steps, count)
    mesh_of, owner_of = _of_each(mesh_of, count), _of_each(owner_of, count)
    tier_of, digests, roots = _of_each(tiers, count), _of_each(digests, count), roots and _of_each(roots, count)
    one_size = len(sizes) == 1
    return Shards(
        [
            ShardRun(
                attempt_of[begin],
                step_of[begin],
                meshes[mesh_of[begin]],
                TIER_NAME[tier_of[begin]],
                owners[owner_of[begin]],
                ranks[begin],
                end - begin,
                sizes if one_size else sizes[begin:end],
                ",".join(digests[begin:end]),
                ",".join(roots[begin:end]),
            )
            for begin, end in _runs(ranks, columns)
        ]
    )


def encode_places(places: Iterable[ShardPlace]) -> list[types_pb2.PlaceRun]:
    return [
        types_pb2.PlaceRun(attempt=run.attempt, step=run.step, tier=TIER_WIRE[run.tier], rank=run.rank, width=run.width)
        for run in place_runs(places)
    ]


def decode_places(message: Iterable[types_pb2.PlaceRun]) -> Places:
    """Decode places. Raises `MalformedMessage` for an unknown tier, and for a run without ranks."""
    runs = []
    for each in message:
        if each.tier not in TIER_NAME or not each.width:
            problem = f"the run of rank {each.rank} has no ranks or a tier that is not known ({', '.join(TIER_WIRE)})"
            raise MalformedMessage("inventory.gone_runs", problem)
        runs.append(PlaceRun(each.attempt, each.step, TIER_NAME[each.tier], each.rank, each.width))
    return Places(runs)


def encode_workers(workers: Sequence[RunningWorker]) -> control_pb2.WorkerColumns:
    runs = worker_runs(workers)
    return control_pb2.WorkerColumns(
        ranks=list(chain.from_iterable(range(run.rank, run.end) for run in runs)),
        jobs=short([run.job for run in runs for _ in range(run.width)]),
        generations=short([run.generation for run in runs for _ in range(run.width)]),
        pids=short([pid for run in runs for pid in run.pids]),
        since=short([at for run in runs for at in full(run.since, run.width)]),
    )


def decode_workers(message: control_pb2.WorkerColumns) -> Workers:
    """Decode workers. Raises `MalformedMessage` for columns of unequal length, and for an invalid time."""
    ranks, pids, since = message.ranks[:], tuple(message.pids[:]), tuple(message.since[:])
    jobs, generations = message.jobs[:], message.generations[:]
    count = len(ranks)
    if not all(map(math.isfinite, since)):
        raise MalformedMessage("worker.since", "not all are times")
    one_kind = len(jobs) == len(generations) == len(since) == 1 and len(pids) == count > 0
    if one_kind and ranks == list(range(ranks[0], ranks[0] + count)):  # nearly always
        return Workers((_worker_run((jobs[0], generations[0], ranks[0], count, pids, since)),))
    _check_lengths("workers", count, jobs, generations, pids, since)
    pids = full(pids, count)
    runs = []
    for begin, end in _runs(ranks, (jobs, generations)):
        job, generation = jobs[begin % len(jobs)], generations[begin % len(generations)]
        at = since if len(since) == 1 else since[begin:end]
        runs.append(WorkerRun(job, generation, ranks[begin], end - begin, pids[begin:end], at))
    return Workers(runs)


def _check_lengths(field: str, count: int, *columns: Sized) -> None:
    """Raises `MalformedMessage` unless each column has a single entry, or one per row."""
    for column in columns:
        if len(column) != count and (len(column) != 1 or not count):
            raise MalformedMessage(field, f"{len(column)} entries for {count}")


def _of_each(column: list[T], count: int) -> list[T]:
    """Return a column with one entry for each row."""
    return column if len(column) == count else column * count


def _runs(ranks: Sequence[int], columns: Iterable[Sequence[object]]) -> list[tuple[int, int]]:
    """Return (begin, end) of each run, that is of consecutive ranks with equal values in all columns."""
    varying = [column for column in columns if len(column) > 1]
    count, begin = len(ranks), 0
    runs = []
    while begin < count:
        end = count
        for column in varying:
            value, place = column[begin], begin + 1
            while place < end and column[place] == value:
                place += 1
            end = place
        first, place = ranks[begin], begin + 1
        while place < end and ranks[place] - first == place - begin:
            place += 1
        runs.append((begin, place))
        begin = place
    return runs
