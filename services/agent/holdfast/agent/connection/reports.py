"""Reports that the supervisor has not acknowledged. Pure.

Numbers increase within an incarnation, and the supervisor ignores numbers that are not above the last one. Every session
begins with `Hello`, so on a new session unacknowledged reports get new numbers after that of the greeting. A report whose
acknowledgement was lost may therefore be sent twice; reports are idempotent.

First steps travel in heartbeats, also those of the session before: each heartbeat repeats them until the supervisor has
recorded them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

from holdfast.domain.inventories import difference
from holdfast.domain.orders import Announced, Hello, Inventory, RanksStepping, Report, WorkersChanged

WAITING_MAX = 1024


@dataclass(frozen=True, slots=True)
class Numbered:
    seq: int
    report: Report


class Reports:
    """A queue of reports. Inventories replace each other; other reports are kept until acknowledged.

    On one session reports arrive in order and completely, so an inventory contains the changes since the session's last one of
    the job. The first one is complete.
    """

    def __init__(self) -> None:
        self._in_beats: dict[str, RanksStepping] = {}  # by job: the newest first steps that are not recorded yet
        self._unsaid = False  # whether no heartbeat has contained some of them
        # Job → the last inventory that was sent on this session: number, complete inventory.
        self._last_sent: dict[str, tuple[int, Inventory]] = {}
        self._seq = 0  # of the last report
        self._waiting: deque[Report] = deque()  # not sent on this session
        self._sent: deque[Numbered] = deque()  # sent, not acknowledged

    def add(self, report: Report) -> None:
        """Raises RuntimeError if more than `WAITING_MAX` reports are queued, which indicates a bug in the agent."""
        for old in [waiting for waiting in self._waiting if _replaces(report, waiting)]:
            self._waiting.remove(old)
        if len(self._waiting) >= WAITING_MAX:
            raise RuntimeError(f"{WAITING_MAX} reports wait for the supervisor; the newest is {report!r}")
        self._waiting.append(report)

    def take(self) -> Numbered | None:
        """Return the next report to send, numbered; None if there is none, or if a heartbeat is to be sent before it."""
        self._move_first_steps()
        # The next report may follow from the first steps, and must not overtake them.
        if not self._waiting or self._unsaid:
            return None
        self._seq += 1
        numbered = Numbered(self._seq, self._waiting.popleft())
        self._sent.append(numbered)
        if isinstance(numbered.report, Inventory):  # an inventory that is sent again on another session is complete
            return Numbered(self._seq, self._since_last(numbered.report))
        return numbered

    def _move_first_steps(self) -> None:
        """Move the first steps that are next to the heartbeats."""
        while self._waiting and isinstance(first := self._waiting[0], RanksStepping):
            self._waiting.popleft()
            self._in_beats[first.job], self._unsaid = first, True

    @property
    def wants_beat(self) -> bool:
        """Whether first steps wait for a heartbeat, which is to be sent now."""
        return self._unsaid

    def in_beat(self) -> tuple[RanksStepping, ...]:
        """Return the first steps for the next heartbeat."""
        self._unsaid = False
        return tuple(self._in_beats.values())

    def recorded(self, job: str, generation: int) -> None:
        """The supervisor has recorded these first steps."""
        if (known := self._in_beats.get(job)) is not None and known.generation == generation:
            del self._in_beats[job]

    def _since_last(self, inventory: Inventory) -> Inventory:
        """Return the changes since this session's last inventory of the job; if there was none, all of it."""
        last = self._last_sent.get(inventory.job)
        self._last_sent[inventory.job] = (self._seq, inventory)
        return difference(last[1], inventory, base=last[0]) if last else inventory

    def acknowledge(self, seq: int) -> None:
        """Record the acknowledgement of this report and all before it."""
        while self._sent and self._sent[0].seq <= seq:
            self._sent.popleft()

    def greet(self, hello: Hello, inventories: Iterable[Inventory] | None = None) -> None:
        """Begin a session: `hello` first, then the unacknowledged reports in order, then the inventories, which `hello`
        announces. None = the replicator has not told all of them yet."""
        if inventories is not None:
            inventories = tuple(inventories)
            hello = replace(hello, announced=Announced(tuple(sorted(each.job for each in inventories))))
        # Hello contains the present workers. An older report of workers, sent after it, would be taken for a newer one.
        again = [each.report for each in self._sent if not isinstance(each.report, Hello | WorkersChanged)]
        again += self._in_beats.values()
        self._sent.clear()
        self._last_sent.clear()
        self._in_beats.clear()
        self._unsaid = False
        newer = [report for report in self._waiting if not isinstance(report, WorkersChanged)]
        self._waiting.clear()
        for report in (hello, *again, *newer, *(inventories or ())):
            self.add(report)


def _replaces(report: Report, waiting: Report) -> bool:
    match report, waiting:
        case Inventory(), Inventory():
            return report.job == waiting.job
        case WorkersChanged(), WorkersChanged():
            return True
        case _:
            return False
