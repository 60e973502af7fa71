"""What nodes keep and delete: the words about it on their way from the supervisor through the agents to the replicators."""

from __future__ import annotations

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.replication import EndJob, PruneSteps, SavedByAll
from holdfast.v1 import control_pb2, replicator_pb2
from holdfast.wire import types


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


def encode_end(request: EndJob) -> replicator_pb2.EndRequest:
    return replicator_pb2.EndRequest(job=request.job, generation=request.generation)


def decode_end(message: replicator_pb2.EndRequest) -> EndJob:
    if not message.job:
        raise MalformedMessage("end.job", "missing")
    return EndJob(job=message.job, generation=message.generation)


def encode_prune(request: PruneSteps) -> replicator_pb2.PruneRequest:
    return replicator_pb2.PruneRequest(job=request.job, steps=types.encode_saved_steps(request.steps))


def decode_prune(message: replicator_pb2.PruneRequest) -> PruneSteps:
    if not message.job:
        raise MalformedMessage("prune.job", "missing")
    return PruneSteps(job=message.job, steps=types.decode_saved_steps(message.steps))


def _read(message: control_pb2.SavedByAll | replicator_pb2.RetainRequest, what: str) -> SavedByAll:
    if not message.job:
        raise MalformedMessage(f"{what}.job", "missing")
    return SavedByAll(job=message.job, attempt=message.attempt, step=message.step)
