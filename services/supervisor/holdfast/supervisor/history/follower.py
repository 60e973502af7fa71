"""Fills the history: follows the events and steps streams from the position where the history ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import anyio
import structlog

from holdfast.domain.clocks import OtherClock
from holdfast.domain.errors import HoldfastError, MalformedMessage, Unavailable
from holdfast.domain.findings import StepRecord
from holdfast.log.names import EVENTS, LEADER_LEASE, STEPS
from holdfast.log.protocol import Delivery, FencedLog
from holdfast.runtime.rpc.backoff import Backoff
from holdfast.supervisor.history.protocol import EventEntry, History
from holdfast.supervisor.picture import Progress
from holdfast.supervisor.published import Published
from holdfast.wire import records
from holdfast.wire.events import decode_published_steps

BATCH_MAX = 1000
WAIT_S = 5.0
SAY_AGAIN_S = 30.0  # a reason why the history is incomplete is logged again after this time

log = structlog.get_logger("holdfast.supervisor.history.follower")


class Troubles:
    """Logs why a stream cannot be followed: the first time, again after `SAY_AGAIN_S` while it lasts, and when it is over."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self.reason = ""  # empty: the stream is followed
        self._logged: dict[str, float] = {}  # by event: time of its log line
        self._times = 0

    def add(self, event: str, error: HoldfastError) -> None:
        self._times += 1
        self.reason = str(error)
        now = anyio.current_time()
        if now - self._logged.get(event, -SAY_AGAIN_S) >= SAY_AGAIN_S:
            self._logged[event] = now
            report = log.warning if isinstance(error, Unavailable) else log.error
            report(event, stream=self._stream, reason=str(error), times=self._times)

    def over(self) -> None:
        self.reason = ""
        if self._logged:
            log.info("the history is followed again", stream=self._stream, times=self._times)
            self._logged.clear()
            self._times = 0


class Follower:
    """Two loops for the service's task group. After a full disk or an outage of the event log, they catch up."""

    def __init__(self, event_log: FencedLog, history: History, progress: Progress) -> None:
        self._log = event_log
        self._history = history
        self._progress = progress
        self._clock = OtherClock()  # of diagnostics, against the time of the leaders
        self._troubles = {stream: Troubles(stream) for stream in (EVENTS, STEPS)}
        self.caught_up = anyio.Event()  # set when the history contains all events that were in the stream at the start

    @property
    def trouble(self) -> str:
        """Why the history lacks what has happened since; empty if it does not."""
        return self._troubles[EVENTS].reason or self._troubles[STEPS].reason

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
        troubles = self._troubles[stream]
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
                troubles.add("the history is falling behind", error)
                await backoff.sleep()
            except HoldfastError as error:
                troubles.add("the history cannot be written", error)
                await backoff.sleep()
            else:
                backoff.reset()
                troubles.over()

    async def _keep_events(self, batch: Sequence[Delivery]) -> None:
        entries = []
        for delivery in batch:
            try:
                entries.append(EventEntry(delivery.position, records.loads(delivery.entry.data, Published)))
            except MalformedMessage as error:
                log.error("a record cannot be read", stream=EVENTS, position=delivery.position, reason=str(error))
        await self._history.add_events(entries, batch[-1].position)

    async def _keep_steps(self, batch: Sequence[Delivery]) -> None:
        """Goodput is computed from steps together with events, so steps are kept in the time of the leaders, too."""
        steps = list[StepRecord]()
        led, clock = await self._log.last_renewal(LEADER_LEASE), self._clock
        for delivery in batch:
            try:
                decoded, published_at = decode_published_steps(delivery.entry.data)
            except MalformedMessage as error:
                log.error("steps cannot be read", stream=STEPS, position=delivery.position, reason=str(error))
                continue
            if led is not None and published_at:
                clock.saw(published_at, led.at + led.ago_s - delivery.age_s)
            steps += (
                [
                    replace(each, started_at=clock.ours(each.started_at), ended_at=clock.ours(each.ended_at))
                    for each in decoded
                ]
                if clock.ahead_s
                else decoded
            )
        self._progress.tell(steps)
        await self._history.add_steps(steps, batch[-1].position)
