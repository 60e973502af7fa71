"""The gRPC adapter of the intake: one `Telemetry.Stream` per agent.

Reading and acknowledging are two tasks, because an acknowledgement may have to wait for the event log while ticks, which are
also the node's sign of life, must go on being read. What an agent does wrong ends its own stream with a message that names
it, and nobody else's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import anyio
import grpc
import structlog

from holdfast.diagnostics.intake import Intake, NodeStream, Receipt, Replaced
from holdfast.diagnostics.publisher import Publisher
from holdfast.domain.errors import HoldfastError, IncompatibleVersion
from holdfast.v1 import telemetry_pb2 as pb
from holdfast.v1 import telemetry_pb2_grpc as pb_grpc
from holdfast.wire.telemetry import decode_tick

SERVICE = "holdfast.v1.Telemetry"
_WAITING_MAX = 256  # acknowledgements of one stream, beyond which those that nobody waits for are skipped

log = structlog.get_logger("holdfast.diagnostics.ingest")
Context = grpc.aio.ServicerContext[pb.Tick, pb.TickAck]


@dataclass(frozen=True, slots=True)
class _Refusal:
    code: grpc.StatusCode
    message: str


class TelemetryServicer(pb_grpc.TelemetryServicer):
    def __init__(self, intake: Intake, publisher: Publisher, *, clock: Callable[[], float]) -> None:
        self._intake = intake
        self._publisher = publisher
        self._clock = clock

    # A coroutine that writes, the other form that grpc.aio takes besides a generator: a task group must not hold a `yield`.
    async def Stream(  # type: ignore[override]  # noqa: N802
        self, request_iterator: AsyncIterator[pb.Tick], context: Context
    ) -> None:
        stream, acks = NodeStream(), _Acks(self._publisher, self._clock)
        refusal: _Refusal | None = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(acks.send, context)
                refusal = await self._read(stream, request_iterator, acks)
                if refusal is not None:
                    tasks.cancel_scope.cancel()
                acks.close()
        finally:
            self._intake.close(stream, clean=stream.goodbye or refusal is not None)
        if refusal is not None:
            log.warning("stream refused", node=stream.node, peer=context.peer(), reason=refusal.message)
            await context.abort(refusal.code, refusal.message)

    async def _read(self, stream: NodeStream, ticks: AsyncIterator[pb.Tick], acks: _Acks) -> _Refusal | None:
        """Until the agent ends the stream, or this side refuses it and says why."""
        try:
            async for message in ticks:
                acks.add(await self._intake.tick(stream, decode_tick(message)))
                stream.goodbye = message.goodbye
        except IncompatibleVersion as error:
            return _Refusal(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except HoldfastError as error:
            return _Refusal(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Replaced as error:
            return _Refusal(grpc.StatusCode.ABORTED, str(error))
        return None


class _Acks:
    """Acknowledgements of one stream, in order: an agent may take each as covering everything before it."""

    def __init__(self, publisher: Publisher, clock: Callable[[], float]) -> None:
        self._publisher = publisher
        self._clock = clock
        self._waiting: deque[tuple[Receipt, float]] = deque()
        self._news = anyio.Event()
        self._closed = False

    def add(self, receipt: Receipt) -> None:
        last = self._waiting[-1][0] if self._waiting else None
        if len(self._waiting) >= _WAITING_MAX and last is not None and not last.must_hold:
            self._waiting.pop()
        self._waiting.append((receipt, self._clock() + receipt.settle_s))
        self._news.set()

    def close(self) -> None:
        """Send what is left, then end."""
        self._closed = True
        self._news.set()

    async def send(self, context: Context) -> None:
        while True:
            while self._waiting:
                receipt, due = self._waiting.popleft()
                if receipt.settle_s:
                    await anyio.sleep(min(receipt.settle_s, max(0.0, due - self._clock())))
                if receipt.must_hold:
                    await self._publisher.wait_published(self._publisher.offered)
                await context.write(pb.TickAck(seq=receipt.seq))
            if self._closed:
                return
            await self._news.wait()
            self._news = anyio.Event()
