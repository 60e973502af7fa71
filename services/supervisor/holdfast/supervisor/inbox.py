"""The inbox: the stream of everything that supervisors receive before the leader folds it.

It contains the reports of agents, the ends of their sessions and operators' requests, in the order of their arrival. Reports
that wait at the same time share one entry, as the bytes that arrived. The leader that wrote an entry keeps its decoded reports
until it reads the entry back.
"""

from __future__ import annotations

import itertools
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable

import anyio
import structlog

from holdfast.domain.errors import Unavailable
from holdfast.log.names import INBOX
from holdfast.log.protocol import Entry, EventLog
from holdfast.runtime.rpc.backoff import Backoff
from holdfast.supervisor.protocol import NodeGone, NodeReported
from holdfast.supervisor.requests import OperatorRequest
from holdfast.wire import records
from holdfast.wire.control import encode_received

BATCH_MAX = 256  # entries
REPORTS_MAX = 32  # in an entry: the leader's batch then has thousands, which are folded in tenths of a second
ENTRY_BYTES_MAX = 256 * 1024  # of reports in an entry, unless a single one is larger
WAITING_MAX = 10_000
DECODED_MAX = 1024  # entries whose decoded reports are kept until they are read back
REPORTS = "Reports"  # type of an entry of reports

InboxEvent = NodeReported | NodeGone | OperatorRequest

log = structlog.get_logger("holdfast.supervisor.inbox")


def gone_entry(event: NodeGone) -> Entry:
    return records.entry(f"{event.node}/{event.incarnation}/gone/{event.session}", event, InboxEvent)


def request_entry(request: OperatorRequest) -> Entry:
    return records.entry(request.operation, request, InboxEvent)


Written = Callable[[], None]
# A report is decoded already; None = an entry, which has no message. Plain tuples take a quarter of the time of named ones.
_Waiting = tuple[NodeReported, bytes, Written] | tuple[Entry, None, Written]


def _nothing() -> None:
    pass


class InboxQueue:
    """What waits to be appended to the inbox, in the order of arrival, and the entries that are made of it. No I/O."""

    def __init__(self, name: str) -> None:
        """`name` makes the ids of entries unique over all queues."""
        self._name = name
        self._waiting: deque[_Waiting] = deque()
        self._numbers = itertools.count(1)
        self._decoded: OrderedDict[str, tuple[NodeReported, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, entry: Entry, written: Callable[[], None] = _nothing) -> None:
        """`written` is called once the entry is in the log."""
        self._waiting.append((entry, None, written))

    def report(self, event: NodeReported, message: bytes, written: Callable[[], None] = _nothing) -> None:
        """`put` for a report that arrived as `message`."""
        self._waiting.append((event, message, written))

    def decoded(self, entry_id: str) -> tuple[NodeReported, ...] | None:
        """The reports of an entry that was written here; None otherwise. Can be called once per entry."""
        return self._decoded.pop(entry_id, None)

    def written(self, count: int) -> None:
        """Record that the first `count` waiting items are in the log."""
        popleft = self._waiting.popleft
        for _ in range(count):
            popleft()[2]()

    def batch(self) -> tuple[list[Entry], int]:
        """The next entries to append, and the number of waiting items that they contain."""
        entries: list[Entry] = []
        together: list[NodeReported] = []
        messages: list[bytes] = []
        size = count = 0
        for content, message, _ in self._waiting:
            if together and (message is None or len(together) >= REPORTS_MAX or size >= ENTRY_BYTES_MAX):
                entries.append(self._report_entry(together, messages))
                together, messages, size = [], [], 0
            if len(entries) >= BATCH_MAX:
                break
            if message is None:
                assert isinstance(content, Entry)
                entries.append(content)
            else:
                assert isinstance(content, NodeReported)
                together.append(content)
                messages.append(message)
                size += len(message)
            count += 1
        if together:
            entries.append(self._report_entry(together, messages))
        return entries, count

    def _report_entry(self, reports: list[NodeReported], messages: list[bytes]) -> Entry:
        entry = Entry(f"{self._name}/{next(self._numbers)}", REPORTS, encode_received(reports, messages))
        self._decoded[entry.id] = tuple(reports)
        if len(self._decoded) > DECODED_MAX:
            self._decoded.popitem(last=False)
        return entry


class InboxWriter:
    """One writer for all sessions of a term. It keeps the order of arrival, and appends everything that waits as one batch.
    While the event log is unavailable, entries wait here unacknowledged; at the end of the term, agents send their reports
    again.
    """

    def __init__(self, event_log: EventLog) -> None:
        self._log = event_log
        self._queue = InboxQueue(uuid.uuid4().hex)
        self._wake = anyio.Event()
        self._room = anyio.Event()
        self.trouble = ""  # why the last append failed; empty = it succeeded

    def put(self, entry: Entry, written: Callable[[], None] = _nothing) -> None:
        """Never waits; sessions call `wait_for_room` before they read more. `written` is called once it is in the log."""
        self._queue.put(entry, written)
        self._wake.set()

    def report(self, event: NodeReported, message: bytes, written: Callable[[], None] = _nothing) -> None:
        """`put` for a report that arrived as `message`."""
        self._queue.report(event, message, written)
        self._wake.set()

    def decoded(self, entry_id: str) -> tuple[NodeReported, ...] | None:
        """The reports of an entry that was written here; None otherwise. Can be called once per entry."""
        return self._queue.decoded(entry_id)

    @property
    def waiting(self) -> bool:
        """Whether some entry is not in the log yet."""
        return bool(self._queue)

    async def wait_for_room(self) -> None:
        while len(self._queue) >= WAITING_MAX:
            await self._room.wait()

    async def run(self) -> None:
        """A loop for the term's task group. Ends only by an exception."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            await self.write()

    async def write(self) -> None:
        """Append everything that waits now."""
        while self._queue:
            entries, count = self._queue.batch()
            await self._append(entries)
            self._queue.written(count)
            self._room.set()
            self._room = anyio.Event()

    async def _append(self, entries: list[Entry]) -> None:
        """Append, retrying without limit. A try whose outcome is unknown is repeated: the core drops repeats."""
        backoff = Backoff(max_s=0.5)
        while True:
            try:
                await self._log.append(INBOX, *entries)
            except Unavailable as error:
                if str(error) != self.trouble:
                    log.warning(
                        "the event log is unavailable; holding reports", held=len(self._queue), reason=str(error)
                    )
                self.trouble = str(error)
                await backoff.sleep()
            else:
                self.trouble = ""
                return
