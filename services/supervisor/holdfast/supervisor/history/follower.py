"""Fills the history: follows the events and steps streams from the position where the history ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio
import structlog

from holdfast.domain.errors import HoldfastError, MalformedMessage, Unavailable
from holdfast.log.names import EVENTS, STEPS
from holdfast.log.protocol import Delivery, EventLog
from holdfast.runtime.backoff import Backoff
from holdfast.supervisor.history.protocol import EventEntry, History
from holdfast.supervisor.leader.picture import Progress
from holdfast.supervisor.published import Published
from holdfast.wire import records
from holdfast.wire.events import decode_steps

BATCH_MAX = 1000
WAIT_S = 5.0

log = structlog.get_logger("holdfast.supervisor.history.follower")


class Follower:
    """Two loops for the service's task group. After a full disk or an outage of the event log, they catch up."""

    def __init__(self, event_log: EventLog, history: History, progress: Progress) -> None:
        self._log = event_log
        self._history = history
        self._progress = progress
        self.caught_up = anyio.Event()  # set when the history contains all events that were in the stream at the start

    async def follow_events(self) -> None:
        cursor, _ = await self._history.cursors()
        await self._follow(EVENTS, cursor, self._keep_events, self.caught_up)

    async def follow_steps(self) -> None:
        _, cursor = await self._history.cursors()
        await self._follow(STEPS, cursor, self._keep_steps, anyio.Event())

    async def _follow(
        self, stream: str, cursor: str, keep: Callable[[Sequence[Delivery]], Awaitable[None]], caught_up: anyio.Event
    ) -> None:
        backoff = Backoff(max_s=1.0)
        while True:
            try:
                wait_s = WAIT_S if caught_up.is_set() else None
                batch = await self._log.read(stream, after=cursor, count=BATCH_MAX, block_s=wait_s)
                if batch:
                    await keep(batch)
                    cursor = batch[-1].position
                else:
                    caught_up.set()
            except Unavailable as error:
                log.warning("the history is falling behind", stream=stream, reason=str(error))
                await backoff.sleep()
            except HoldfastError as error:
                log.error("the history cannot be written", stream=stream, reason=str(error))
                await backoff.sleep()
            else:
                backoff.reset()

    async def _keep_events(self, batch: Sequence[Delivery]) -> None:
        entries = []
        for delivery in batch:
            try:
                entries.append(EventEntry(delivery.position, records.loads(delivery.entry.data, Published)))
            except MalformedMessage as error:
                log.error("a record cannot be read", stream=EVENTS, position=delivery.position, reason=str(error))
        await self._history.add_events(entries, batch[-1].position)

    async def _keep_steps(self, batch: Sequence[Delivery]) -> None:
        steps = []
        for delivery in batch:
            try:
                steps.extend(decode_steps(delivery.entry.data))
            except MalformedMessage as error:
                log.error("steps cannot be read", stream=STEPS, position=delivery.position, reason=str(error))
        self._progress.tell(steps)
        await self._history.add_steps(steps, batch[-1].position)
