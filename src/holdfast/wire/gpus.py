"""Requests for the values of a node's GPUs, and the answers, within a control session."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.gpus import GPUS_MAX, GpuState
from holdfast.v1 import control_pb2 as pb

_ALWAYS = ("gpu", "uuid", "at", "lost")
_OPTIONAL = tuple(field.name for field in fields(GpuState) if field.name not in _ALWAYS)
UUID_CHARACTERS_MAX = 96


def encode_request(number: int) -> pb.SupervisorMessage:
    return pb.SupervisorMessage(read_gpus=pb.ReadGpus(id=number))


def encode_answer(number: int, gpus: Sequence[GpuState]) -> pb.AgentMessage:
    return pb.AgentMessage(gpus_read=pb.GpusRead(id=number, gpus=[_encode(gpu) for gpu in gpus[:GPUS_MAX]]))


def decode_answer(message: pb.GpusRead) -> tuple[GpuState, ...]:
    """Raises `MalformedMessage` for more GPUs than a node has, and for values that are none."""
    if len(message.gpus) > GPUS_MAX:
        raise MalformedMessage("gpus_read.gpus", f"{len(message.gpus)}, more than {GPUS_MAX}")
    return tuple(_decode(gpu) for gpu in message.gpus)


def _encode(state: GpuState) -> pb.Gpu:
    return pb.Gpu(**{field.name: value for field in fields(state) if (value := getattr(state, field.name)) is not None})


def _decode(message: pb.Gpu) -> GpuState:
    values = {name: getattr(message, name) for name in _OPTIONAL if message.HasField(name)}
    numbers = (message.at, *values.values())
    if not all(math.isfinite(value) for value in numbers) or len(message.uuid) > UUID_CHARACTERS_MAX:
        raise MalformedMessage("gpus_read.gpus", f"GPU {message.gpu} has a value that is no number, or no UUID")
    return GpuState(message.gpu, message.uuid, message.at, message.lost, **values)
