"""Requests for parts of logs, and the answers, within a control session."""

from __future__ import annotations

from holdfast.domain.errors import MalformedMessage, NotFound
from holdfast.domain.names import is_job_name
from holdfast.domain.worker_logs import PART_BYTES_MAX, LogPart, LogRequest
from holdfast.v1 import control_pb2 as pb


def encode_request(number: int, request: LogRequest) -> pb.SupervisorMessage:
    wanted = pb.ReadLog(
        id=number,
        job=request.job,
        generation=request.generation,
        rank=request.rank,
        offset=request.offset,
        bytes_max=request.bytes_max,
    )
    return pb.SupervisorMessage(read_log=wanted)


def decode_request(message: pb.ReadLog) -> LogRequest:
    """Raises `MalformedMessage` for what cannot be part of a path, and for more bytes than an answer may have."""
    if not is_job_name(message.job):
        raise MalformedMessage("read_log.job", f"{message.job[:200]!r} is not a valid name of a job")
    if not 0 < message.bytes_max <= PART_BYTES_MAX:
        raise MalformedMessage("read_log.bytes_max", f"{message.bytes_max} is not between 1 and {PART_BYTES_MAX}")
    return LogRequest(message.job, message.generation, message.rank, message.offset, message.bytes_max)


def encode_answer(number: int, answer: LogPart | str) -> pb.AgentMessage:
    """`answer`: the part, or why there is none."""
    if isinstance(answer, str):
        return pb.AgentMessage(log_read=pb.LogRead(id=number, problem=answer))
    read = pb.LogRead(id=number, offset=answer.offset, size=answer.size, data=answer.data)
    return pb.AgentMessage(log_read=read)


def decode_answer(message: pb.LogRead) -> LogPart:
    """Raises `NotFound` with the agent's reason if there is no part, and `MalformedMessage` for one that nobody asked for."""
    if message.problem:
        raise NotFound(message.problem[:500])
    if len(message.data) > PART_BYTES_MAX:
        raise MalformedMessage("log_read.data", f"{len(message.data)} bytes, more than {PART_BYTES_MAX}")
    return LogPart(message.offset, message.size, message.data)
