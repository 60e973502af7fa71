"""The inbox: everything that supervisors are told before the leader folds it.

Reports of agents, the ends of their sessions and operators' requests stand in one stream, in the order in which they were said.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import structlog

from holdfast.domain.errors import Unavailable
from holdfast.log.names import INBOX
from holdfast.log.protocol import Entry, EventLog
from holdfast.runtime.backoff import Backoff
from holdfast.supervisor.protocol import NodeGone, NodeReported
from holdfast.supervisor.requests import OperatorRequest
from holdfast.wire import records

BATCH_MAX = 256
WAITING_MAX = 10_000

InboxEvent = NodeReported | NodeGone | OperatorRequest

log = structlog.get_logger("holdfast.supervisor.leader.inbox")


def report_entry(event: NodeReported, traceparent: str = "") -> Entry:
    return records.entry(f"{event.node}/{event.incarnation}/{event.seq}", event, InboxEvent, traceparent)


def gone_entry(event: NodeGone) -> Entry:
    return records.entry(f"{event.node}/{event.incarnation}/gone/{event.session}", event, InboxEvent)


def request_entry(request: OperatorRequest) -> Entry:
    return records.entry(request.operation, request, InboxEvent)


@dataclass(frozen=True, slots=True)
class _Waiting:
    entry: Entry
    written: Callable[[], None]


class InboxWriter:
    """One writer for all sessions of a term: what is put in first stands first, and what gathers while the log is busy goes as
    one batch. While the log is away everything waits here, unacknowledged; at the end of the term agents say it again.
    """

    def __init__(self, event_log: EventLog) -> None:
        self._log = event_log
        self._waiting: deque[_Waiting] = deque()
        self._news = anyio.Event()
        self._room = anyio.Event()

    def put(self, entry: Entry, written: Callable[[], None] = lambda: None) -> None:
        """Never waits; sessions ask `wait_for_room` before they read more. `written` is called once it stands in the log."""
        self._waiting.append(_Waiting(entry, written))
        self._news.set()

    @property
    def waiting(self) -> bool:
        """Something does not stand in the log yet."""
        return bool(self._waiting)

    async def wait_for_room(self) -> None:
        while len(self._waiting) >= WAITING_MAX:
            await self._room.wait()

    async def run(self) -> None:
        """A loop for the term's task group. Ends by an exception only."""
        while True:
            await self._news.wait()
            self._news = anyio.Event()
            while self._waiting:
                batch = [self._waiting[i] for i in range(min(BATCH_MAX, len(self._waiting)))]
                await self._append([each.entry for each in batch])
                for each in batch:
                    self._waiting.popleft()
                    each.written()
                self._room.set()
                self._room = anyio.Event()

    async def _append(self, entries: list[Entry]) -> None:
        """Append, for ever if need be. A try that failed in doubt is repeated: the core drops what it has seen."""
        backoff = Backoff(max_s=0.5)
        while True:
            try:
                await self._log.append(INBOX, *entries)
            except Unavailable as error:
                log.warning("the event log is away; holding reports", held=len(self._waiting), reason=str(error))
                await backoff.sleep()
            else:
                return
