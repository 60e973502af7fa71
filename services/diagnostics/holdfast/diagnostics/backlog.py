"""Queues of ticks that have been read but not folded yet. They decide how diagnostics behaves under overload.

Ticks are folded in time slices. Between two slices further ticks are read, because reading is cheap and an unread tick may be
urgent. Without overload a tick waits for microseconds. Under overload:

* At most `WAITING_MAX` ticks of each stream wait. When another tick arrives, the oldest tick that contains only telemetry is
  dropped and counted, because the present state of a node is worth more than its past.
* Streams with a tick that must not be dropped (exits, kernel lines) are folded first, so that findings are not delayed.
* A stream with `KEPT_MAX` ticks that must not be dropped is not read until these ticks have been folded.

Ticks of one stream are folded in the order in which they arrived. The end of the stream is folded after its last tick.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import perf_counter

import anyio
import structlog

from holdfast.v1 import telemetry_pb2 as pb
from holdfast.wire.telemetry import count_droppable, is_reliable

WAITING_MAX = 4  # ticks of one stream; an agent sends one tick per second
KEPT_MAX = 64  # waiting ticks that must not be dropped; at this number, reading of the stream pauses
SLICE_S = 0.002  # longest time of folding before other tasks may run: the readers, and a stream that opens
_LOG_EVERY_S = 10.0

log = structlog.get_logger("holdfast.diagnostics.backlog")


@dataclass(eq=False, slots=True)
class Line:
    """The waiting ticks of one stream. `fold` is called with each tick in order. If `fold` raises, `refuse` is called with the
    exception and the remaining ticks are dropped. `ended` is called once, after the last tick."""

    fold: Callable[[pb.Tick], Awaitable[None]]
    refuse: Callable[[Exception], None]
    ended: Callable[[], None]
    waiting: deque[pb.Tick] = field(default_factory=deque)
    kept: int = 0  # waiting ticks that must not be dropped
    refused: bool = False
    closed: bool = False  # the stream has ended
    over: bool = False  # `ended` has been called
    queued: bool = False  # in the routine queue
    urgent: bool = False  # in the urgent queue
    room: anyio.Event = field(default_factory=anyio.Event)  # set, and replaced, when the waiting ticks have been folded


class Backlog:
    """The queues of all streams. `dropped` counts signals since the start of the process."""

    def __init__(self) -> None:
        self._urgent: deque[Line] = deque()
        self._routine: deque[Line] = deque()
        self._work = anyio.Event()
        self._logged_at = float("-inf")
        self.dropped = 0

    async def put(self, line: Line, message: pb.Tick) -> None:
        """Queue a tick. Blocks only while `KEPT_MAX` ticks that must not be dropped wait in this stream."""
        while line.kept >= KEPT_MAX:
            await line.room.wait()
        if line.refused:
            return
        if len(line.waiting) >= WAITING_MAX:
            self._drop_oldest(line)
        line.waiting.append(message)
        if reliable := is_reliable(message):
            line.kept += 1
        self._queue(line, urgent=reliable)

    def close(self, line: Line) -> None:
        """Record the end of the stream: `ended` is called after its waiting ticks have been folded."""
        if not line.closed:
            line.closed = True
            self._queue(line, urgent=True)

    async def fold(self) -> None:
        """Fold queued ticks, in a loop for the service's task group. Ends only by an exception."""
        try:
            while True:
                await self._work.wait()
                await self._fold_all()
                self._work = anyio.Event()
        finally:
            if self.dropped:
                self._log_dropped()

    async def _fold_all(self) -> None:
        until = perf_counter() + SLICE_S
        while (line := self._next()) is not None:
            await self._fold(line)
            if perf_counter() >= until:
                await anyio.lowlevel.checkpoint()
                until = perf_counter() + SLICE_S

    def _queue(self, line: Line, *, urgent: bool) -> None:
        if urgent and not line.urgent:
            line.urgent = True
            self._urgent.append(line)
        elif not line.queued and not line.urgent:
            line.queued = True
            self._routine.append(line)
        self._work.set()

    def _next(self) -> Line | None:
        if self._urgent:
            line = self._urgent.popleft()
            line.urgent = False
            return line
        if self._routine:
            line = self._routine.popleft()
            line.queued = False
            return line
        return None

    async def _fold(self, line: Line) -> None:
        try:
            while line.waiting:
                await line.fold(line.waiting.popleft())
        except Exception as error:  # a malformed tick, or a bug that the tick exposes: only this stream ends
            line.refused = True
            line.waiting.clear()
            line.refuse(error)
        if line.kept:
            line.kept = 0
            line.room.set()
            line.room = anyio.Event()
        if line.closed and not line.over:
            line.over = True
            line.ended()

    def _drop_oldest(self, line: Line) -> None:
        place = next((i for i, message in enumerate(line.waiting) if not is_reliable(message)), None)
        if place is None:
            return
        self.dropped += count_droppable(line.waiting[place])
        del line.waiting[place]
        if perf_counter() - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = perf_counter()
            self._log_dropped()

    def _log_dropped(self) -> None:
        log.warning("telemetry dropped", reason="ticks arrive faster than they are folded", signals_so_far=self.dropped)
