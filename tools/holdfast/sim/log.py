"""The simulated event log: the streams of `MemoryLog` in virtual time, with the bytes that production writes.

Entries survive every other process, but not always a restart of the log itself. A log that flushes once a second and loses
power returns to its contents at one moment of its last second: entries, positions and the leader's snapshot together. The
effects of the lost entries on nodes remain.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from holdfast.domain.findings import StepRecord
from holdfast.log.names import FINDINGS, INBOX, LEADER_LEASE, STEPS, SUPERVISOR_GROUP, SUPERVISOR_STREAMS
from holdfast.log.protocol import Commit, Delivery, Entry, Lease, Renewal
from holdfast.log.streams import Reader, Streams
from holdfast.sim.clocks import Clock
from holdfast.sim.world import World
from holdfast.supervisor.core import State
from holdfast.supervisor.inbox import InboxQueue, gone_entry, request_entry
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.leader.intake import Intake, take
from holdfast.supervisor.leader.term import CONSUMER
from holdfast.supervisor.protocol import Event, FindingArrived, NodeGone, NodeReported
from holdfast.supervisor.requests import OperatorEvent, OperatorRequest, fingerprint
from holdfast.wire.control import encode_report
from holdfast.wire.events import finding_entry, step_entries

FLUSHED_S = 1.0
LENGTH_MAX = 1000  # entries of a stream; nobody reads the leader's events here


class _Contents:
    """The contents of the log's server, and what its one consumer has read."""

    def __init__(self, state: State, length_max: int) -> None:
        self.clock_s = 0.0  # the server's clock at the write that is carried out
        self.streams = Streams(self._now, stream_length_max=length_max, next_epoch=self._epoch)
        self.lease = self._acquire("an operator")
        self.streams.commit(self.lease, Commit(snapshot=snapshot.changes(None, state)))
        self.reader = self._reader()

    def _now(self) -> float:
        return self.clock_s

    def _epoch(self) -> int:
        return int(self.clock_s)

    def _acquire(self, holder: str) -> Lease:
        lease = self.streams.acquire(LEADER_LEASE, holder, inf)
        assert lease is not None
        return lease

    def _reader(self) -> Reader:
        return self.streams.reader(*SUPERVISOR_STREAMS, group=SUPERVISOR_GROUP, consumer=CONSUMER)

    def elect(self, holder: str) -> Lease:
        """End the lease of the last leader, as its time does, and begin to read as the next."""
        self.streams.release(self.lease)
        self.lease, self.reader = self._acquire(holder), self._reader()
        return self.lease


class _Write(NamedTuple):
    at: float  # the world's time
    clock_s: float
    apply: Callable[[_Contents], object]

    def carry_out(self, contents: _Contents) -> None:
        contents.clock_s = self.clock_s
        self.apply(contents)


class Log:
    def __init__(
        self,
        world: World,
        clock: Clock,
        state: State,
        *,
        flushes_late: bool = False,
        length_max: int = LENGTH_MAX,
        gathers: bool = False,
    ) -> None:
        """`flushes_late`: the last second of the log can be lost. `gathers`: what arrives for the inbox waits until the leader
        reads, as while production's writer waits for the log, and reports then share entries."""
        self._world, self._clock, self._gathers = world, clock, gathers
        self._length_max = length_max
        self._contents = _Contents(state, length_max)
        self._flushed = _Contents(state, length_max) if flushes_late else None
        self._unflushed: deque[_Write] = deque()  # oldest first
        self._terms = 0
        self._operations = 0
        self._queue = InboxQueue("")

    # ------------------------------------------------------------ the leader

    def elect(self) -> Lease:
        """Return the lease of the next leader. Its epoch is higher than all before, including those that were lost with the
        data, unless two leaders are elected within the same second."""
        self._terms += 1
        self._queue = InboxQueue(f"term {self._terms}")
        holder = f"leader {self._terms}"
        self._write(lambda contents: contents.elect(holder))
        return self._contents.lease

    def renew(self, at: float) -> None:
        """Record the leader's time, as it does with each renewal of its lease."""
        self._write(lambda contents: contents.streams.renew(contents.lease, inf, at))

    def last_renewal(self) -> Renewal | None:
        """Return the last renewal. Its age is that at the last write, which is the election of the leader that asks."""
        return self._contents.streams.last_renewal(LEADER_LEASE)

    def load(self) -> State:
        """Return the state of the last commit, from its bytes."""
        return snapshot.load(self._contents.streams.snapshot(LEADER_LEASE))

    def take(self, at: float) -> Intake:
        """Read and decode the next batch. It is delivered again to the next leader unless this one commits it."""
        self._append_waiting()
        batch: list[Delivery] = []
        self._write(lambda contents: batch.extend(contents.reader.take()) if not batch else contents.reader.take())
        return take(batch, at, self._queue.decoded)

    def commit(self, lease: Lease, commit: Commit) -> None:
        self._write(lambda contents: contents.streams.commit(lease, commit))

    @property
    def is_behind(self) -> bool:
        """Whether some entry has not been folded."""
        return bool(self._queue) or self._contents.streams.is_behind(SUPERVISOR_GROUP, *SUPERVISOR_STREAMS)

    # ------------------------------------------------------------ entries

    def append(self, event: Event, written: Callable[[], None] = lambda: None) -> None:
        """`written` is called when the event, a report, is in the log."""
        match event:
            case FindingArrived(finding=finding):
                self._append(FINDINGS, finding_entry(finding))
            case NodeReported(report=report, seq=seq):
                message = encode_report(report, seq)
                self._queue.report(event, message.SerializeToString(), written)
            case NodeGone():
                self._queue.put(gone_entry(event))
            case _:
                assert isinstance(event, OperatorEvent)
                self._operations += 1
                operation = f"operation {self._operations}"
                self._queue.put(request_entry(OperatorRequest(operation, event, fingerprint(event))))
        if not self._gathers:
            self._append_waiting()

    def append_steps(self, records: Sequence[StepRecord]) -> None:
        self._append(STEPS, *step_entries(records))

    def _append_waiting(self) -> None:
        while self._queue:
            entries, count = self._queue.batch()
            self._append(INBOX, *entries)
            self._queue.written(count)

    def _append(self, stream: str, *entries: Entry) -> None:
        self._write(lambda contents: contents.streams.append(stream, *entries))

    # ------------------------------------------------------------ losses

    def lose_tail(self, lost_s: float) -> None:
        """Restart with the data of `lost_s` ago, at most a second."""
        assert self._flushed is not None
        while self._unflushed and self._unflushed[0].at <= self._world.now - lost_s:
            self._unflushed.popleft().carry_out(self._flushed)
        self._restart(self._flushed)

    def lose_everything(self, state: State) -> None:
        self._restart(_Contents(state, self._length_max))

    def _restart(self, contents: _Contents) -> None:
        self._contents = contents
        self._flushed = copy.deepcopy(contents) if self._flushed is not None else None
        self._unflushed.clear()

    def _write(self, apply: Callable[[_Contents], object]) -> None:
        write = _Write(self._world.now, self._clock.now(), apply)
        write.carry_out(self._contents)
        if self._flushed is None:
            return
        self._unflushed.append(write)
        while self._unflushed[0].at <= self._world.now - FLUSHED_S:
            self._unflushed.popleft().carry_out(self._flushed)
