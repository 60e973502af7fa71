"""The inbox: everything that supervisors are told before the leader folds it.

Reports of agents, the ends of their sessions and operators' requests stand in one stream, in the order in which they were said.
Reports that wait together stand in one entry, as the bytes that came; the leader that wrote them keeps what it has decoded
until it reads the entry back.
"""

from __future__ import annotations

import itertools
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import NamedTuple

import anyio
import structlog

from holdfast.domain.errors import Unavailable
from holdfast.log.names import INBOX
from holdfast.log.protocol import Entry, EventLog
from holdfast.runtime.backoff import Backoff
from holdfast.supervisor.protocol import NodeGone, NodeReported
from holdfast.supervisor.requests import OperatorRequest
from holdfast.wire import records
from holdfast.wire.control import Reported, encode_reports

BATCH_MAX = 256  # entries
REPORTS_MAX = 32  # in an entry: the leader's batch has thousands then, and is folded in tenths of a second
ENTRY_BYTES_MAX = 256 * 1024  # of reports in an entry, unless one alone is larger
WAITING_MAX = 10_000
DECODED_MAX = 1024  # entries of which is kept what they say, until they are read
REPORTS = "Reports"  # type of such an entry

InboxEvent = NodeReported | NodeGone | OperatorRequest

log = structlog.get_logger("holdfast.supervisor.leader.inbox")


def gone_entry(event: NodeGone) -> Entry:
    return records.entry(f"{event.node}/{event.incarnation}/gone/{event.session}", event, InboxEvent)


def request_entry(request: OperatorRequest) -> Entry:
    return records.entry(request.operation, request, InboxEvent)


class _Waiting(NamedTuple):
    said: Entry | tuple[NodeReported, Reported]  # a report is decoded already
    written: Callable[[], None]


def _nothing() -> None:
    pass


class InboxWriter:
    """One writer for all sessions of a term: what is put in first stands first, and what gathers while the log is busy goes as
    one batch. While the log is away everything waits here, unacknowledged; at the end of the term agents say it again.
    """

    def __init__(self, event_log: EventLog) -> None:
        self._log = event_log
        self._waiting: deque[_Waiting] = deque()
        self._news = anyio.Event()
        self._room = anyio.Event()
        self._name = uuid.uuid4().hex  # nobody else's entries have these ids
        self._numbers = itertools.count(1)
        self._decoded: OrderedDict[str, tuple[NodeReported, ...]] = OrderedDict()

    def put(self, entry: Entry, written: Callable[[], None] = _nothing) -> None:
        """Never waits; sessions ask `wait_for_room` before they read more. `written` is called once it stands in the log."""
        self._waiting.append(_Waiting(entry, written))
        self._news.set()

    def report(self, event: NodeReported, message: bytes, written: Callable[[], None] = _nothing) -> None:
        """`put` of a report that came as `message`."""
        raw = Reported(event.at, event.node, event.incarnation, event.session, message)
        self._waiting.append(_Waiting((event, raw), written))
        self._news.set()

    def decoded(self, entry_id: str) -> tuple[NodeReported, ...] | None:
        """What an entry says, once, if it was written here."""
        return self._decoded.pop(entry_id, None)

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
            await self.write()

    async def write(self) -> None:
        """What waits now."""
        while self._waiting:
            entries, count = self._batch()
            await self._append(entries)
            for _ in range(count):
                self._waiting.popleft().written()
            self._room.set()
            self._room = anyio.Event()

    def _batch(self) -> tuple[list[Entry], int]:
        """The next entries to append, and how many of those that wait they hold."""
        entries: list[Entry] = []
        together: list[tuple[NodeReported, Reported]] = []
        size = count = 0
        for each in self._waiting:
            said = each.said
            alone = isinstance(said, Entry)
            full = len(together) >= REPORTS_MAX or size >= ENTRY_BYTES_MAX
            if together and (alone or full):
                entries.append(self._together(together))
                together, size = [], 0
            if len(entries) >= BATCH_MAX:
                break
            if isinstance(said, Entry):
                entries.append(said)
            else:
                together.append(said)
                size += len(said[1].message)
            count += 1
        if together:
            entries.append(self._together(together))
        return entries, count

    def _together(self, reports: list[tuple[NodeReported, Reported]]) -> Entry:
        entry = Entry(f"{self._name}/{next(self._numbers)}", REPORTS, encode_reports(raw for _, raw in reports))
        self._decoded[entry.id] = tuple([event for event, _ in reports])
        if len(self._decoded) > DECODED_MAX:
            self._decoded.popitem(last=False)
        return entry

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
