"""The gRPC adapter of the sessions: one `Control.Session` per agent.

A report is acknowledged when it stands in the inbox: from then on it is not lost, whoever leads. First steps in heartbeats are
not in the inbox, and confirmed when they are committed. What an agent does wrong ends
its own session with a message that names it, and nobody else's.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import NamedTuple

import anyio
import grpc
import structlog

from holdfast.domain.errors import HoldfastError, MalformedMessage
from holdfast.domain.nodes import PEERS, NodeFacts
from holdfast.domain.orders import Hello, Tested
from holdfast.runtime.rpc.grpc_access import caller
from holdfast.runtime.rpc.grpc_server import write_whole
from holdfast.runtime.telling.refusal_log import RefusalLog
from holdfast.supervisor.agents.sessions import AgentSession, Outgoing, Refused, Sessions
from holdfast.supervisor.protocol import node_reported
from holdfast.v1 import control_pb2 as pb
from holdfast.v1 import control_pb2_grpc as pb_grpc
from holdfast.wire import gpus, rank_reads, worker_logs
from holdfast.wire.control import (
    decode_first_steps,
    decode_report,
    decode_started,
    decode_steps_reached,
    decode_telemetry_cut_s,
    decode_versions,
    encode_ack,
    encode_peers,
    encode_welcome,
)

SERVICE = "holdfast.v1.Control"
HELLO_TIMEOUT_S = 5.0
NOT_THE_LEADER = "not the leader"

log = structlog.get_logger("holdfast.supervisor.agents.control")


class Received(NamedTuple):
    """An agent's message, and its bytes as they arrived: these go into the inbox."""

    message: pb.AgentMessage
    raw: bytes


Context = grpc.aio.ServicerContext[Received, Outgoing]
Messages = AsyncIterator[Received]


class ControlServicer(pb_grpc.ControlServicer):
    """`sessions` gives those of the present term, None when this supervisor does not lead."""

    def __init__(
        self,
        sessions: Callable[[], Sessions | None],
        *,
        supervisor: str,
        diagnostics: Sequence[str],
        clock: Callable[[], float],
    ) -> None:
        self._sessions = sessions
        self._supervisor = supervisor
        self._diagnostics = tuple(diagnostics)
        self._clock = clock
        self._refusals = RefusalLog("holdfast.supervisor.agents.control", "session refused")

    # A coroutine that writes, the other form that grpc.aio takes besides a generator: a task group must not hold a `yield`.
    async def Session(  # type: ignore[override]  # noqa: N802
        self, request_iterator: Messages, context: Context
    ) -> None:
        try:
            await self._serve(request_iterator, context)
        except Refused as refusal:
            if str(refusal) == NOT_THE_LEADER:  # of every agent, several times a second, until a supervisor leads
                self._refusals.expected(context.peer(), str(refusal))
            else:
                self._refusals.add(context.peer(), str(refusal))
            await context.abort(refusal.code, str(refusal))

    async def _serve(self, messages: Messages, context: Context) -> None:
        first = await _first(messages)  # before any refusal: an agent whose Hello fails does not see the reason
        sessions = self._sessions()
        if sessions is None:
            raise Refused(grpc.StatusCode.FAILED_PRECONDITION, NOT_THE_LEADER)
        facts = _facts(first.message)
        if reason := caller().refusal_for(facts.node):
            raise Refused(grpc.StatusCode.PERMISSION_DENIED, reason)
        session = sessions.open(facts, context.peer())
        log.info("session", node=session.node, peer=session.peer, incarnation=session.incarnation)
        welcome = encode_welcome(sessions.epoch, self._supervisor, self._diagnostics, sessions.peers(session))
        session.offer(welcome)
        async with anyio.create_task_group() as tasks:
            try:
                tasks.start_soon(self._read, sessions, session, first, messages)
                tasks.start_soon(_write, session, context)
                await session.ended.wait()
            finally:  # not behind a message on its way to an agent that does not read
                sessions.leave(session)
                reason = session.end.message if session.end else "its agent has ended it, or the connection is broken"
                log.info("session ended", node=session.node, reason=reason)
            tasks.cancel_scope.cancel()
        if session.end is not None and session.end.code is not grpc.StatusCode.OK:
            raise Refused(session.end.code, session.end.message)

    async def _read(self, sessions: Sessions, session: AgentSession, first: Received, messages: Messages) -> None:
        try:
            self._take(sessions, session, first)
            async for received in messages:
                session.heard()
                message = received.message
                match message.WhichOneof("report"):
                    case "beat":
                        beat = message.beat
                        session.beat(
                            beat.workers_version,
                            decode_steps_reached(beat),
                            decode_started(beat),
                            telemetry_cut_s=decode_telemetry_cut_s(beat),
                            versions=decode_versions(beat),
                        )
                        session.machine_clock.saw(beat.at, self._clock())
                        sessions.first_steps(session, beat.at, decode_first_steps(beat))
                    case "log_read":
                        read = message.log_read
                        session.logs.take(read.id, partial(worker_logs.decode_answer, read))
                    case "gpus_read":
                        answer = message.gpus_read
                        session.gpus.take(answer.id, partial(gpus.decode_answer, answer))
                    case "ranks_read":
                        ranks = message.ranks_read
                        session.ranks.take(ranks.id, partial(rank_reads.decode_ranks, ranks))
                    case "errors_read":
                        errors = message.errors_read
                        session.errors.take(errors.id, partial(rank_reads.decode_errors, errors))
                    case _:
                        self._take(sessions, session, received)
                        await sessions.inbox.wait_for_room()
        except HoldfastError as error:
            session.close(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        else:
            session.close(grpc.StatusCode.OK, "its agent has ended it, or the connection is broken")

    def _take(self, sessions: Sessions, session: AgentSession, received: Received) -> None:
        message, raw = received
        report = decode_report(message)
        if isinstance(report, Hello) and _name(report.facts) != (session.node, session.incarnation):
            raise MalformedMessage("hello", f"the session of {session.node} cannot become that of {report.facts.node}")
        sessions.latencies.heard(report)
        event = node_reported(self._clock(), session.node, session.incarnation, message.seq, report, session.number)
        acknowledge = partial(session.offer, encode_ack(message.seq))
        sessions.inbox.report(event, raw, acknowledge)
        if isinstance(report, Tested) and report.preflight.has_failed(PEERS):
            session.offer(encode_peers(sessions.peers(session)))


def add_to_server(servicer: ControlServicer, server: grpc.aio.Server) -> None:
    """Like the generated function, for messages whose bytes are needed or exist already."""
    session = grpc.stream_stream_rpc_method_handler(
        servicer.Session, request_deserializer=_received, response_serializer=_serialized
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Session": session}),))
    server.add_registered_method_handlers(SERVICE, {"Session": session})


def _received(raw: bytes) -> Received:
    return Received(pb.AgentMessage.FromString(raw), raw)


def _serialized(message: Outgoing) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


async def _write(session: AgentSession, context: Context) -> None:
    while True:
        await write_whole(context, await session.next())


async def _first(messages: Messages) -> Received:
    with anyio.move_on_after(HELLO_TIMEOUT_S):
        async for message in messages:
            return message
    raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"no Hello within {HELLO_TIMEOUT_S:g} s")


def _facts(first: pb.AgentMessage) -> NodeFacts:
    try:
        report = decode_report(first)
    except MalformedMessage as error:
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
    if not isinstance(report, Hello):
        raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"a session begins with Hello, not {type(report).__name__}")
    return report.facts


def _name(facts: NodeFacts) -> tuple[str, str]:
    return facts.node, facts.incarnation
