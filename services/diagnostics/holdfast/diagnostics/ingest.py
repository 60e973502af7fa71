"""gRPC adapter of the intake: one `Telemetry.Stream` per agent.

Ticks are also the node's heartbeat. Reading, folding and acknowledging are therefore separate: ticks are read while others are
folded (`backlog`) and while an acknowledgement waits for the event log. If a tick cannot be folded, only the stream of its
agent ends, with a message that names the cause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib.metadata import version

import anyio
import grpc
import structlog

from holdfast.diagnostics.backlog import Backlog, Line
from holdfast.diagnostics.intake import Intake
from holdfast.diagnostics.publisher import Publisher
from holdfast.diagnostics.ticks import NodeStream, Receipt, Replaced
from holdfast.domain.distribution import DISTRIBUTION
from holdfast.domain.errors import HoldfastError, IncompatibleVersion, MalformedMessage
from holdfast.runtime.rpc.grpc_access import caller
from holdfast.runtime.rpc.grpc_server import write_whole
from holdfast.runtime.trust.authorization import Caller
from holdfast.v1 import telemetry_pb2 as pb
from holdfast.v1 import telemetry_pb2_grpc as pb_grpc
from holdfast.wire.telemetry import decode_tick

SERVICE = "holdfast.v1.Telemetry"
VERSION = version(DISTRIBUTION)
# The outbox of an agent that could not send for a long time is full at about 2 MiB.
_TICK_BYTES_MAX = 4 << 20

log = structlog.get_logger("holdfast.diagnostics.ingest")
Context = grpc.aio.ServicerContext[pb.Tick, pb.TickAck]


class NotItsNode(Exception):
    """A tick names a node for which the certificate of the stream does not stand."""


@dataclass(frozen=True, slots=True)
class _Refusal:
    code: grpc.StatusCode
    message: str


class TelemetryServicer(pb_grpc.TelemetryServicer):
    """`refused` counts the streams that diagnostics has ended because a tick could not be folded."""

    def __init__(self, intake: Intake, backlog: Backlog, publisher: Publisher, *, clock: Callable[[], float]) -> None:
        self._intake = intake
        self._backlog = backlog
        self._publisher = publisher
        self._clock = clock
        self.refused = 0

    # A coroutine that writes, not a generator (grpc.aio accepts both): a task group must not contain a `yield`.
    async def Stream(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.Tick], context: Context
    ) -> None:
        agent = _Agent(self._intake, _Acks(self._publisher, self._clock), caller())
        line = Line(fold=agent.fold, refuse=agent.refuse, ended=agent.ended)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(agent.acks.send, context)
                with agent.reading:
                    async for message in request_iterator:
                        if line.waiting:
                            self._intake.heard(agent.stream)
                        await self._backlog.put(line, message)
                self._backlog.close(line)
                await agent.over.wait()
                if agent.refusal is not None:
                    tasks.cancel_scope.cancel()
                agent.acks.close()
        finally:
            self._backlog.close(line)
        if agent.refusal is not None:
            self.refused += 1
            log.warning(
                "stream refused",
                node=agent.stream.node,
                peer=context.peer(),
                reason=agent.refusal.message,
                so_far=self.refused,
            )
            await context.abort(agent.refusal.code, agent.refusal.message)


class _Agent:
    """The callbacks of one stream for the backlog."""

    def __init__(self, intake: Intake, acks: _Acks, caller: Caller) -> None:
        self._intake = intake
        self._caller = caller
        self.acks = acks
        self.stream = NodeStream()
        self.refusal: _Refusal | None = None
        self.reading = anyio.CancelScope()
        self.over = anyio.Event()

    async def fold(self, message: pb.Tick) -> None:
        if (size := message.ByteSize()) > _TICK_BYTES_MAX:
            raise MalformedMessage("tick", f"{size} bytes; at most {_TICK_BYTES_MAX}")
        tick = decode_tick(message)
        if reason := self._caller.refusal_for(tick.node):
            raise NotItsNode(reason)
        receipt = await self._intake.tick(self.stream, tick)
        if receipt.must_hold or message.wants_ack:
            self.acks.add(receipt)
        self.stream.goodbye = message.goodbye

    def refuse(self, error: Exception) -> None:
        self.refusal = _refusal(error)
        self.reading.cancel()

    def ended(self) -> None:
        self._intake.close(self.stream, clean=self.stream.goodbye or self.refusal is not None)
        self.over.set()


def _refusal(error: Exception) -> _Refusal:
    match error:
        case IncompatibleVersion():
            return _Refusal(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        case HoldfastError():
            return _Refusal(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        case NotItsNode():
            return _Refusal(grpc.StatusCode.PERMISSION_DENIED, str(error))
        case Replaced():
            return _Refusal(grpc.StatusCode.ABORTED, str(error))
        case _:
            log.error("tick not folded, please report this bug", exc_info=error)
            return _Refusal(
                grpc.StatusCode.INTERNAL, f"diagnostics failed to fold a tick: {type(error).__name__}: {error}"
            )


class _Acks:
    """Acknowledgements of one stream, in order. Each acknowledgement covers all earlier ticks."""

    def __init__(self, publisher: Publisher, clock: Callable[[], float]) -> None:
        self._publisher = publisher
        self._clock = clock
        self._waiting: deque[tuple[Receipt, float]] = deque()
        self._changed = anyio.Event()
        self._closed = False

    def add(self, receipt: Receipt) -> None:
        if self._waiting and not self._waiting[-1][0].must_hold:
            self._waiting.pop()  # the new acknowledgement covers this tick
        self._waiting.append((receipt, self._clock() + receipt.settle_s))
        self._changed.set()

    def close(self) -> None:
        """Make `send` return after the waiting acknowledgements have been sent."""
        self._closed = True
        self._changed.set()

    async def send(self, context: Context) -> None:
        while True:
            while self._waiting:
                receipt, due = self._waiting.popleft()
                if receipt.settle_s:
                    await anyio.sleep(min(receipt.settle_s, max(0.0, due - self._clock())))
                if receipt.must_hold:
                    await self._publisher.wait_published(self._publisher.offered)
                await write_whole(context, pb.TickAck(seq=receipt.seq, version=VERSION))
            if self._closed:
                return
            await self._changed.wait()
            self._changed = anyio.Event()
