"""Requests for what a node's ranks of a job measure or have raised, and the answers, within a control session."""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.domain.errors import MalformedMessage, NotFound
from holdfast.domain.names import is_job_name
from holdfast.domain.rank_reads import (
    ERROR_CHARS_MAX,
    ERRORS_MAX,
    FRAMES_MAX,
    RANKS_MAX,
    MeasuredRanks,
    RaisedError,
)
from holdfast.domain.signals import WorkerError
from holdfast.v1 import control_pb2 as pb

FRAME_CHARS_MAX = 400
TYPE_CHARS_MAX = 200


def encode_ranks_request(number: int, job: str) -> pb.SupervisorMessage:
    return pb.SupervisorMessage(read_ranks=pb.ReadRanks(id=number, job=job))


def encode_ranks(number: int, measured: MeasuredRanks) -> pb.AgentMessage:
    return pb.AgentMessage(
        ranks_read=pb.RanksRead(
            id=number,
            generation=measured.generation,
            ranks=measured.rank[:RANKS_MAX],
            step_s=measured.step_s[:RANKS_MAX],
            wait_s=measured.wait_s[:RANKS_MAX],
            temperature_c=measured.temperature_c[:RANKS_MAX],
        )
    )


def decode_ranks(message: pb.RanksRead) -> MeasuredRanks:
    """Raises `MalformedMessage` for columns of different lengths or too many ranks. A value that is infinite is not known."""
    ranks = tuple(message.ranks)
    columns = [tuple(map(_known, each)) for each in (message.step_s, message.wait_s, message.temperature_c)]
    if len(ranks) > RANKS_MAX or any(len(each) != len(ranks) for each in columns):
        lengths = [len(ranks), *map(len, columns)]
        raise MalformedMessage("ranks_read", f"columns of {lengths} entries, not of one length up to {RANKS_MAX}")
    return MeasuredRanks(message.generation, ranks, *columns)


def encode_errors_request(number: int, job: str, generation: int) -> pb.SupervisorMessage:
    return pb.SupervisorMessage(read_errors=pb.ReadErrors(id=number, job=job, generation=generation))


def decode_errors_request(message: pb.ReadErrors) -> tuple[str, int]:
    """(job, generation). Raises `MalformedMessage` for what cannot be part of a path."""
    if not is_job_name(message.job):
        raise MalformedMessage("read_errors.job", f"{message.job[:200]!r} is not a valid name of a job")
    return message.job, message.generation


def encode_errors(number: int, answer: Sequence[RaisedError] | str) -> pb.AgentMessage:
    """`answer`: the exceptions, or why they cannot be read."""
    if isinstance(answer, str):
        return pb.AgentMessage(errors_read=pb.ErrorsRead(id=number, problem=answer))
    errors = [
        pb.RaisedError(
            generation=each.generation,
            rank=each.rank,
            at=each.error.at,
            type=each.error.type[:TYPE_CHARS_MAX],
            message=each.error.message[:ERROR_CHARS_MAX],
            frames=[frame[:FRAME_CHARS_MAX] for frame in each.error.frames[-FRAMES_MAX:]],
        )
        for each in answer[:ERRORS_MAX]
    ]
    return pb.AgentMessage(errors_read=pb.ErrorsRead(id=number, errors=errors))


def decode_errors(message: pb.ErrorsRead) -> tuple[RaisedError, ...]:
    """Raises `NotFound` with the agent's reason if they cannot be read, and `MalformedMessage` for more than an answer has."""
    if message.problem:
        raise NotFound(message.problem[:500])
    if len(message.errors) > ERRORS_MAX:
        raise MalformedMessage("errors_read.errors", f"{len(message.errors)}, more than {ERRORS_MAX}")
    return tuple(
        RaisedError(
            each.generation,
            each.rank,
            WorkerError(
                each.type[:TYPE_CHARS_MAX],
                each.message[:ERROR_CHARS_MAX],
                tuple(frame[:FRAME_CHARS_MAX] for frame in each.frames[-FRAMES_MAX:]),
                each.at if math.isfinite(each.at) else 0.0,
            ),
        )
        for each in message.errors
    )


def _known(value: float) -> float:
    return value if math.isfinite(value) else math.nan
