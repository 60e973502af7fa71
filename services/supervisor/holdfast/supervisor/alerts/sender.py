"""Sends alerts: each address has a queue, a rate and retries of its own, so that one that is slow or gone delays no other.

An alert is taken from the events stream, and acknowledged there, when it is in the queues. What waits in them is lost if the
supervisor ends; a supervisor that stops in good order sends what it can within `FAREWELL_S`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

import anyio
import structlog

from holdfast.domain.errors import HoldfastError, MalformedMessage, Unavailable
from holdfast.log.names import ALERTS_GROUP, EVENTS
from holdfast.log.protocol import EventLog
from holdfast.runtime.rpc.backoff import Backoff
from holdfast.supervisor.alerts.alert import Alert, Topic, alert_of, held_back
from holdfast.supervisor.alerts.targets import Notifier
from holdfast.supervisor.published import Published
from holdfast.wire import records

QUEUE_MAX = 100  # alerts that wait for one address; older ones are counted as held back
RATE_MAX, RATE_S = 20, 300.0  # alerts to one address within so many seconds
RETRY_FOR_S = 900.0  # of one alert
RETRY_MAX_S = 60.0  # longest pause between two attempts
FAREWELL_S = 5.0

log = structlog.get_logger("holdfast.supervisor.alerts")


class Address:
    """One notifier with its queue."""

    def __init__(self, notifier: Notifier, *, clock: Callable[[], float] = time.time) -> None:
        self._notifier = notifier
        self._clock = clock
        self._waiting: deque[Alert] = deque()
        self._held = 0
        self._sent_s: deque[float] = deque(maxlen=RATE_MAX)  # by the monotonic clock
        self._more = anyio.Event()

    @property
    def name(self) -> str:
        return self._notifier.name

    def offer(self, alert: Alert) -> None:
        """Never waits."""
        if len(self._waiting) >= QUEUE_MAX:
            self._waiting.popleft()
            self._held += 1
        self._waiting.append(alert)
        self._more.set()

    async def run(self) -> None:
        while True:
            while not self._waiting and not self._held:
                self._more = anyio.Event()
                await self._more.wait()
            await self._pace()
            await self._send(self._next())

    async def farewell(self) -> None:
        """Send what waits, once each, without retries."""
        while self._waiting or self._held:
            await self.try_once(self._next())

    async def try_once(self, alert: Alert) -> str:
        """Return what went wrong; empty if it was sent."""
        try:
            await self._notifier.send(alert)
        except HoldfastError as error:
            return str(error)
        except Exception as error:  # a plug-in's, or a library's
            return f"{self.name}: {type(error).__name__}: {error}"
        return ""

    def _next(self) -> Alert:
        if self._waiting:
            return self._waiting.popleft()
        count, self._held = self._held, 0
        return held_back(count, self._clock(), self.name)

    async def _pace(self) -> None:
        """Wait until another alert may be sent; what gathers meanwhile beyond one is summed up."""
        if len(self._sent_s) == RATE_MAX and (wait_s := self._sent_s[0] + RATE_S - anyio.current_time()) > 0:
            await anyio.sleep(wait_s)
            self._held += len(self._waiting)
            self._waiting.clear()
        self._sent_s.append(anyio.current_time())

    async def _send(self, alert: Alert) -> None:
        backoff, deadline = Backoff(max_s=RETRY_MAX_S), anyio.current_time() + RETRY_FOR_S
        while True:
            try:
                await self._notifier.send(alert)
                return
            except Unavailable as error:
                if anyio.current_time() >= deadline:
                    log.error("alert given up", address=self.name, alert=alert.title, reason=str(error))
                    return
                log.warning("alert not sent yet", address=self.name, alert=alert.title, reason=str(error))
            except HoldfastError as error:
                log.error("alert refused", address=self.name, alert=alert.title, reason=str(error))
                return
            except Exception as error:  # a plug-in's, or a library's: training and other addresses go on
                log.error(
                    "alert failed", address=self.name, alert=alert.title, reason=f"{type(error).__name__}: {error}"
                )
                return
            await backoff.sleep()


class Alerts:
    """What a supervisor sends. Without addresses it reads nothing."""

    def __init__(
        self, event_log: EventLog, notifiers: Sequence[Notifier], topics: Collection[Topic], *, consumer: str
    ) -> None:
        self._log, self._topics, self._consumer = event_log, frozenset(topics), consumer
        self._addresses = [Address(each) for each in notifiers]

    def __bool__(self) -> bool:
        return bool(self._addresses)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the addresses, without secrets."""
        return tuple(each.name for each in self._addresses)

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics of which the addresses are notified; empty without addresses."""
        return tuple(sorted(self._topics)) if self._addresses else ()

    async def run(self) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                for address in self._addresses:
                    tasks.start_soon(address.run)
                await self._follow()
        finally:
            with anyio.move_on_after(FAREWELL_S, shield=True):
                async with anyio.create_task_group() as tasks:
                    for address in self._addresses:
                        tasks.start_soon(address.farewell)

    async def test(self, alert: Alert) -> dict[str, str]:
        """Send this alert to every address at once. Returns address → what went wrong; empty if it was sent."""
        outcome: dict[str, str] = {}

        async def send(number: int, address: Address) -> None:
            outcome[f"{number}: {address.name}"] = await address.try_once(alert)

        async with anyio.create_task_group() as tasks:
            for number, address in enumerate(self._addresses, start=1):
                tasks.start_soon(send, number, address)
        return dict(sorted(outcome.items()))

    def offer(self, alert: Alert) -> None:
        """Queue it for every address, if its topic is chosen. Never waits."""
        for address in self._addresses if alert.topic in self._topics else ():
            address.offer(alert)

    async def _follow(self) -> None:
        batches = self._log.subscribe(EVENTS, group=ALERTS_GROUP, consumer=self._consumer, start="$")
        async for batch in batches:
            for delivery in batch:
                try:
                    record = records.loads(delivery.entry.data, Published)
                except MalformedMessage as error:
                    log.error("a record cannot be read", stream=EVENTS, position=delivery.position, reason=str(error))
                    continue
                if (alert := alert_of(record, self._topics)) is not None:
                    self.offer(alert)
            if batch:
                await self._acknowledge([delivery.position for delivery in batch])

    async def _acknowledge(self, positions: Sequence[str]) -> None:
        try:
            await self._log.acknowledge(EVENTS, ALERTS_GROUP, *positions)
        except Unavailable as error:  # they come again: an alert may then be sent twice, with the same id
            log.warning("alerts are not acknowledged", reason=str(error))
