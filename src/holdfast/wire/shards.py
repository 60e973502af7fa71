"""Agent ↔ checkpoint-replicator: requests, answers and inventories ↔ `holdfast/v1/replicator.proto`."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.orders import Inventory
from holdfast.domain.replication import ArchiveNow, Configure, Stage, StagedShard, Trouble, TroubleKind
from holdfast.v1 import replicator_pb2 as pb
from holdfast.wire import types


def encode_configure(request: Configure) -> pb.ConfigureRequest:
    return pb.ConfigureRequest(
        job=request.job,
        generation=request.generation,
        attempt=request.attempt,
        mesh=types.encode_mesh(request.mesh),
        ranks=request.ranks,
        peers=types.encode_sources(request.peers),
        keep=request.keep,
        token=request.token,
        store=request.store,
        store_interval_s=request.store_interval_s,
        store_keep=request.store_keep,
        first_attempt=request.first_attempt,
    )


def decode_configure(message: pb.ConfigureRequest) -> Configure:
    if not message.job:
        raise MalformedMessage("configure.job", "missing")
    return Configure(
        job=message.job,
        generation=message.generation,
        attempt=message.attempt,
        mesh=types.decode_mesh(message.mesh, "configure.mesh"),
        ranks=tuple(message.ranks),
        peers=types.decode_sources(message.peers),
        keep=message.keep,
        token=message.token,
        store=message.store,
        store_interval_s=types.check_time(message.store_interval_s, "configure.store_interval_s"),
        store_keep=message.store_keep,
        first_attempt=message.first_attempt,
    )


def encode_stage(request: Stage) -> pb.StageRequest:
    return pb.StageRequest(job=request.job, shards=types.encode_restores(request.shards), timeout_s=request.timeout_s)


def decode_stage(message: pb.StageRequest) -> Stage:
    if not message.job:
        raise MalformedMessage("stage.job", "missing")
    return Stage(
        job=message.job,
        shards=types.decode_restores(message.shards),
        timeout_s=types.check_time(message.timeout_s, "stage.timeout_s"),
    )


def encode_staged(shards: Iterable[StagedShard]) -> pb.StageResponse:
    return pb.StageResponse(
        shards=[
            pb.StagedShard(
                rank=shard.rank,
                shard=types.encode_shard_key(shard.shard),
                path=shard.path,
                source=shard.source,
                size=shard.size,
            )
            for shard in shards
        ]
    )


def decode_staged(message: pb.StageResponse) -> tuple[StagedShard, ...]:
    return tuple(
        StagedShard(
            rank=shard.rank,
            shard=types.decode_shard_key(shard.shard),
            path=shard.path,
            source=shard.source,
            size=shard.size,
        )
        for shard in message.shards
    )


def encode_archive(request: ArchiveNow) -> pb.ArchiveRequest:
    return pb.ArchiveRequest(job=request.job, generation=request.generation, step=request.step)


def decode_archive(message: pb.ArchiveRequest) -> ArchiveNow:
    if not message.job:
        raise MalformedMessage("archive.job", "missing")
    return ArchiveNow(job=message.job, generation=message.generation, step=message.step)


def encode_inventory(inventory: Inventory, troubles: Iterable[Trouble] = ()) -> pb.ReplicatorInventory:
    return pb.ReplicatorInventory(
        job=inventory.job,
        shards=[types.encode_shard_record(shard) for shard in inventory.shards],
        stored=types.encode_stored(inventory.stored),
        troubles=[
            pb.Trouble(kind=each.kind.value, place=each.place, reason=each.reason, since=each.since)
            for each in troubles
        ],
    )


def decode_inventory(message: pb.ReplicatorInventory) -> Inventory:
    return Inventory(
        job=message.job,
        shards=tuple(types.decode_shard_record(shard) for shard in message.shards),
        stored=types.decode_stored(message.stored),
    )


def decode_troubles(message: pb.ReplicatorInventory) -> tuple[Trouble, ...]:
    """What is wrong with the job's checkpoints there; kinds of another release are passed over."""
    known = {kind.value for kind in TroubleKind}
    return tuple(
        Trouble(TroubleKind(each.kind), each.place, each.reason, types.check_time(each.since, "trouble.since"))
        for each in message.troubles
        if each.kind in known
    )
