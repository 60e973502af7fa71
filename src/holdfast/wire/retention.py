"""Retention updates, which the supervisor sends through the agents to the replicators."""

from __future__ import annotations

from holdfast.domain.replication import CommonCheckpoint, EndJob, PruneSteps
from holdfast.v1 import control_pb2, replicator_pb2
from holdfast.wire.derived import Codec

_SAVED_BY_ALL = Codec(CommonCheckpoint, control_pb2.SavedByAll, "saved_by_all", beside=["epoch"], named=["job"])
_RETAIN = Codec(CommonCheckpoint, replicator_pb2.RetainRequest, "retain", named=["job"])
_END = Codec(EndJob, replicator_pb2.EndRequest, "end", named=["job"])
_PRUNE = Codec(PruneSteps, replicator_pb2.PruneRequest, "prune", named=["job"])

decode_saved_by_all = _SAVED_BY_ALL.decode
encode_retain, decode_retain = _RETAIN.encode, _RETAIN.decode
encode_end, decode_end = _END.encode, _END.decode
encode_prune, decode_prune = _PRUNE.encode, _PRUNE.decode


def encode_saved_by_all(epoch: int, saved: CommonCheckpoint) -> control_pb2.SupervisorMessage:
    """Encode a retention update. It is neither numbered nor answered, because the next update replaces it."""
    return control_pb2.SupervisorMessage(saved_by_all=_SAVED_BY_ALL.encode(saved, epoch=epoch))
