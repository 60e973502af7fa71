"""Ticks that have been read and are not folded yet: what happens when agents say more than this process can think about.

Reading is cheap and goes on; folding takes what it can, a slice of time at a time: what has not been read may be urgent.
While it keeps up, a tick waits for microseconds. When it does not, the oldest telemetry goes: of each stream the newest
`WAITING_MAX` ticks wait, and with another one the oldest that carries only telemetry is dropped and counted, because where a
node stands now is worth more than how it came there. What must not be dropped (exits, kernel lines) is folded before what all
the others have waiting, so that findings flow; when a stream has too much of that waiting, it is read no further until there
is room.

Ticks of one stream are folded in the order in which they came, and its end after the last of them.
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

WAITING_MAX = 4  # ticks of one stream: seconds
KEPT_MAX = 64  # of those that must not be dropped, before the stream is read no further
SLICE_S = 0.002  # of folding, then it is the turn of the readers, and of a stream that opens: one per turn
_SAY_EVERY_S = 10.0

log = structlog.get_logger("holdfast.diagnostics.backlog")


@dataclass(eq=False, slots=True)
class Line:
    """One stream's ticks. `fold` takes the next one, `refuse` what it raised, after which nothing more is folded; `ended` is
    called once, after the last of them."""

    fold: Callable[[pb.Tick], Awaitable[None]]
    refuse: Callable[[Exception], None]
    ended: Callable[[], None]
    waiting: deque[pb.Tick] = field(default_factory=deque)
    kept: int = 0  # of the waiting ones
    refused: bool = False
    closed: bool = False  # nothing more will come
    over: bool = False  # and the last has been folded
    queued: bool = False  # among those that have something waiting
    urgent: bool = False  # among those that go first
    room: anyio.Event = field(default_factory=anyio.Event)  # set, and replaced, when it has been folded


class Backlog:
    """`dropped` counts signals since the start."""

    def __init__(self) -> None:
        self._urgent: deque[Line] = deque()
        self._routine: deque[Line] = deque()
        self._work = anyio.Event()
        self._said_at = float("-inf")
        self.dropped = 0

    async def put(self, line: Line, message: pb.Tick) -> None:
        """Let it wait to be folded. Returns at once unless its stream has too much waiting that must be kept."""
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
        """Nothing more will come. What waits is folded, then `ended` is called."""
        if not line.closed:
            line.closed = True
            self._queue(line, urgent=True)

    async def fold(self) -> None:
        """A loop for the service's task group. Ends by an exception only."""
        try:
            while True:
                await self._work.wait()
                await self._fold_all()
                self._work = anyio.Event()
        finally:
            if self.dropped:
                self._say_dropped()

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
        except (
            Exception
        ) as error:  # one stream's business: a message that cannot be taken, or a bug that it brought to light
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
        if perf_counter() - self._said_at >= _SAY_EVERY_S:
            self._said_at = perf_counter()
            self._say_dropped()

    def _say_dropped(self) -> None:
        log.warning("telemetry dropped: more comes than can be folded", signals_so_far=self.dropped)
