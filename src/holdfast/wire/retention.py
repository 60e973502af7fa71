"""The step that no node may be left without, on its way from the supervisor through the agents to the replicators."""

from __future__ import annotations

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.replication import SavedByAll
from holdfast.v1 import control_pb2, replicator_pb2


def encode_saved_by_all(epoch: int, saved: SavedByAll) -> control_pb2.SupervisorMessage:
    """Not numbered and not answered: the next one replaces it."""
    word = control_pb2.SavedByAll(epoch=epoch, job=saved.job, attempt=saved.attempt, step=saved.step)
    return control_pb2.SupervisorMessage(saved_by_all=word)


def decode_saved_by_all(message: control_pb2.SavedByAll) -> SavedByAll:
    return _read(message, "saved_by_all")


def encode_retain(saved: SavedByAll) -> replicator_pb2.RetainRequest:
    return replicator_pb2.RetainRequest(job=saved.job, attempt=saved.attempt, step=saved.step)


def decode_retain(message: replicator_pb2.RetainRequest) -> SavedByAll:
    return _read(message, "retain")


def _read(message: control_pb2.SavedByAll | replicator_pb2.RetainRequest, what: str) -> SavedByAll:
    if not message.job:
        raise MalformedMessage(f"{what}.job", "missing")
    return SavedByAll(job=message.job, attempt=message.attempt, step=message.step)
