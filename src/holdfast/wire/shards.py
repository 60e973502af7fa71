"""Agent ↔ checkpoint-replicator: requests, answers and inventories ↔ `holdfast/v1/replicator.proto`."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.domain.orders import Inventory
from holdfast.domain.replication import Configure, Stage, StagedShard, Trouble, TroubleKind, UploadNow
from holdfast.v1 import replicator_pb2 as pb
from holdfast.wire import types
from holdfast.wire.derived import Codec, Through

_CONFIGURE = Codec(Configure, pb.ConfigureRequest, "configure", named=["job"], times=["store_interval_s"])
_STAGE = Codec(Stage, pb.StageRequest, "stage", named=["job"], times=["timeout_s"])
_ARCHIVE = Codec(UploadNow, pb.ArchiveRequest, "archive", named=["job"])
_STAGED = Codec(StagedShard, pb.StagedShard, "staged")
_TROUBLE = Codec(Trouble, pb.Trouble, "trouble", times=["since"], through={"kind": Through(str, TroubleKind)})

encode_configure, decode_configure = _CONFIGURE.encode, _CONFIGURE.decode
encode_stage, decode_stage = _STAGE.encode, _STAGE.decode
encode_archive, decode_archive = _ARCHIVE.encode, _ARCHIVE.decode


def encode_staged(shards: Iterable[StagedShard]) -> pb.StageResponse:
    return pb.StageResponse(shards=[_STAGED.encode(shard) for shard in shards])


def decode_staged(message: pb.StageResponse) -> tuple[StagedShard, ...]:
    return tuple(map(_STAGED.decode, message.shards))


def encode_inventory(inventory: Inventory, troubles: Iterable[Trouble] = ()) -> pb.ReplicatorInventory:
    return pb.ReplicatorInventory(
        job=inventory.job,
        shards=[types.SHARD_RECORD.encode(shard) for shard in inventory.shards],
        stored=[types.STORED_STEP.encode(step) for step in inventory.stored],
        troubles=[_TROUBLE.encode(each) for each in troubles],
    )


def decode_inventory(message: pb.ReplicatorInventory) -> Inventory:
    return Inventory(
        job=message.job,
        shards=tuple(map(types.SHARD_RECORD.decode, message.shards)),
        stored=tuple(map(types.STORED_STEP.decode, message.stored)),
    )


def decode_troubles(message: pb.ReplicatorInventory) -> tuple[Trouble, ...]:
    """Return the problems of the job's checkpoints on a node; problems of unknown kinds are skipped."""
    known = {kind.value for kind in TroubleKind}
    return tuple(_TROUBLE.decode(each) for each in message.troubles if each.kind in known)
