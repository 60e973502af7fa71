"""The newest events in memory: one reader of the event log for all readers of `/v1/events`. A reader of its own for each would
hold a connection to Redis each, and leave the leader none to renew its lease with."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import anyio

from holdfast.domain.errors import HoldfastError, Unavailable
from holdfast.log.names import EVENTS
from holdfast.log.protocol import Delivery, EventLog
from holdfast.runtime.rpc.backoff import Backoff
from holdfast.supervisor.published import PolicyAsked

WAIT_S = 5.0
BATCH_MAX = 100
KEPT_MAX = 300
LATE_READS_MAX = 8  # reads at a time for readers of what is no longer kept


class EventTail:
    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._kept: list[Delivery] = []
        self._since = ""  # position after which every event that readers get is kept; empty = not known
        self._end = ""  # position up to which the log was read
        self._trouble = ""  # why the log cannot be read
        self._changed = anyio.Event()
        self._late = anyio.CapacityLimiter(LATE_READS_MAX)

    async def run(self) -> None:
        """Runs until cancelled."""
        backoff = Backoff(max_s=1.0)
        while True:
            try:
                await self._read()
            except HoldfastError as error:
                self._trouble, self._since = str(error), ""
                self._kept.clear()
                self._wake()
                await backoff.sleep()
            else:
                backoff.reset()

    async def after(self, position: str) -> Sequence[Delivery]:
        """Return the next events after a position, after `WAIT_S` none. Raises `Unavailable` while the log cannot be read."""
        with anyio.move_on_after(WAIT_S):
            while True:
                changed = self._changed
                if self._trouble:
                    raise Unavailable(self._trouble)
                if found := await self._found(position):
                    return found
                await changed.wait()
        return ()

    async def _found(self, position: str) -> Sequence[Delivery]:
        if self._since and _order(position) >= _order(self._since):
            begin = bisect_right(self._kept, _order(position), key=lambda each: _order(each.position))
            return self._kept[begin : begin + BATCH_MAX]
        async with self._late:
            return await self._log.read(EVENTS, after=position, count=BATCH_MAX)

    async def _read(self) -> None:
        if not self._since:
            self._since = self._end = await self._log.last_position(EVENTS)
        batch = await self._log.read(EVENTS, after=self._end, count=BATCH_MAX, block_s=WAIT_S)
        if batch:
            self._end = batch[-1].position
        self._kept += [each for each in batch if is_sent(each)]
        if excess := self._kept[:-KEPT_MAX]:
            self._since = excess[-1].position
            del self._kept[: len(excess)]
        if batch or self._trouble:
            self._trouble = ""
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def is_sent(delivery: Delivery) -> bool:
    """Whether readers get an event: not a policy's question, of a large job 100 KB, which has a route of its own."""
    return delivery.entry.type != PolicyAsked.__name__


def _order(position: str) -> tuple[int, int]:
    milliseconds, _, number = position.partition("-")
    return int(milliseconds), int(number or 0)
