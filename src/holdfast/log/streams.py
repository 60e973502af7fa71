"""The contents of an event log in memory: streams, groups, leases and snapshots, with the guarantees of `log.protocol`.

No call waits, and time comes from `clock`: `MemoryLog` puts this behind an event loop, the simulator drives it in virtual time.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.domain.errors import InvalidSpec, StaleEpoch
from holdfast.log import names
from holdfast.log.keys import DEAD_SUFFIX
from holdfast.log.protocol import CANDIDATE_S, Backlog, Commit, Delivery, Entry, Lease, LostData, Renewal

RECLAIM_CHECKS = 5  # looks for abandoned entries per `reclaim_after_s`


@dataclass(slots=True)
class _Pending:
    """An entry that was delivered and not yet acknowledged."""

    consumer: str
    since_s: float
    deliveries: int


@dataclass(slots=True)
class _Group:
    last: int  # newest entry delivered
    pending: dict[int, _Pending] = field(default_factory=dict)


@dataclass(slots=True)
class _Stream:
    numbers: list[int] = field(default_factory=list)  # ascending; the position "7-0" is number 7
    entries: dict[int, Entry] = field(default_factory=dict)
    since_s: dict[int, float] = field(default_factory=dict)  # time of each append
    groups: dict[str, _Group] = field(default_factory=dict)
    size_bytes: int = 0

    def add(self, number: int, entry: Entry, at_s: float) -> None:
        self.numbers.append(number)
        self.entries[number] = entry
        self.since_s[number] = at_s
        self.size_bytes += _size(entry)

    def after(self, number: int, count: int) -> list[int]:
        begin = bisect.bisect_right(self.numbers, number)
        return self.numbers[begin : begin + count]

    def trim(self, length: int) -> None:
        surplus = len(self.numbers) - length
        if surplus > 0:
            for number in self.numbers[:surplus]:
                self.size_bytes -= _size(self.entries.pop(number))
                del self.since_s[number]
            del self.numbers[:surplus]

    def trim_bytes(self, bytes_max: int) -> None:
        while self.size_bytes > bytes_max:
            self.trim(len(self.numbers) - 1)

    def trim_consumed(self) -> None:
        """Remove the entries that every group has acknowledged."""
        needed = min((min(group.pending, default=group.last + 1) for group in self.groups.values()), default=0)
        self.trim(len(self.numbers) - bisect.bisect_left(self.numbers, needed))


@dataclass(slots=True)
class _Held:
    lease: Lease
    until_s: float


class Streams:
    """`next_epoch` returns the lowest epoch that a new lease may have, as the server's clock does on Redis."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        stream_length_max: int = 100_000,
        stream_bytes_max: int = 128 * 2**20,
        reclaim_after_s: float = 5.0,
        deliveries_max: int = 5,
        consumed: Collection[str] = names.CONSUMED,
        next_epoch: Callable[[], int] = lambda: 1,
    ) -> None:
        self._clock = clock
        self._stream_length_max = stream_length_max
        self._stream_bytes_max = stream_bytes_max
        self._consumed = frozenset(consumed)
        self._reclaim_after_s = reclaim_after_s
        self._deliveries_max = deliveries_max
        self._next_epoch = next_epoch
        self._streams: dict[str, _Stream] = {}
        self._numbers = itertools.count(1)
        self._held: dict[str, _Held] = {}
        self._candidates: dict[str, tuple[str, float]] = {}  # by lease: last unsuccessful requester, and its expiry
        self._epochs: dict[str, int] = {}  # outlives `flush`, as the server's clock does on Redis
        self._snapshots: dict[str, dict[str, bytes]] = {}
        self._renewals: dict[str, tuple[float, float]] = {}  # by lease: the holder's time, and the log's

    # ------------------------------------------------------------------ streams

    def append(self, stream: str, *entries: Entry) -> list[str]:
        return [self._add(stream, entry) for entry in entries]

    def reader(self, *streams: str, group: str, consumer: str, batch_max: int = 256, start: str = "0") -> Reader:
        for stream in streams:
            self._group(stream, group, start)
        return Reader(self, streams, group, consumer, max(1, batch_max // len(streams)))

    def acknowledge(self, stream: str, group: str, *positions: str) -> None:
        self._acknowledge(stream, group, [number_of(position) for position in positions])

    def after(self, stream: str, position: str, count: int) -> list[Delivery]:
        """Return the first `count` entries after `position`, without a group."""
        held = self._streams.get(stream, _Stream())
        numbers = held.after(0 if position == "0" else number_of(position), count)
        return [
            Delivery(stream, _position(number), held.entries[number], age_s=self._age_s(held, number))
            for number in numbers
        ]

    def last_position(self, stream: str) -> str:
        held = self._streams.get(stream)
        return _position(held.numbers[-1]) if held and held.numbers else "0"

    def backlog(self, stream: str, group: str) -> Backlog:
        held = self._streams.get(stream)
        reader = held.groups.get(group) if held else None
        if held is None or reader is None:
            return Backlog()
        waiting = held.after(reader.last, 1)
        return Backlog(len(reader.pending), self._age_s(held, waiting[0]) if waiting else 0.0)

    def is_behind(self, group: str, *streams: str) -> bool:
        """Whether the group has not read or not acknowledged an entry of these streams."""
        for stream in streams:
            held = self._streams.get(stream)
            reader = held.groups.get(group) if held else None
            if held is not None and held.numbers and (reader is None or reader.pending):
                return True
            if held is not None and reader is not None and held.after(reader.last, 1):
                return True
        return False

    @property
    def size_bytes(self) -> int:
        return sum(held.size_bytes for held in self._streams.values())

    # ------------------------------------------------------------------ leadership

    def acquire(self, name: str, holder: str, ttl_s: float, *, begin: bool = True) -> Lease | None:
        held = self._current(name)
        if held is not None and held.lease.holder != holder:
            held.until_s = min(held.until_s, self._clock() + ttl_s)
            self._candidates[name] = (holder, self._clock() + CANDIDATE_S)
            return None
        if held is None:
            if name not in self._epochs and not begin:
                raise LostData(f"there has been no holder of the lease {name!r}")
            self._epochs[name] = max(self._epochs.get(name, 0) + 1, self._next_epoch())
            held = _Held(Lease(name=name, holder=holder, epoch=self._epochs[name]), 0.0)
            self._held[name] = held
        held.until_s = self._clock() + ttl_s
        return held.lease

    def newest_epoch(self, name: str) -> int:
        return self._epochs.get(name, 0)

    def candidate(self, name: str) -> str:
        holder, until_s = self._candidates.get(name, ("", 0.0))
        return holder if self._clock() < until_s else ""

    def renew(self, lease: Lease, ttl_s: float, at: float | None = None) -> bool:
        held = self._current(lease.name)
        if held is None or held.lease != lease:
            return False
        held.until_s = self._clock() + ttl_s
        if at is not None:
            self._renewals[lease.name] = (at, self._clock())
        return True

    def last_renewal(self, name: str) -> Renewal | None:
        if name not in self._renewals:
            return None
        at, renewed_at_s = self._renewals[name]
        return Renewal(at, max(0.0, self._clock() - renewed_at_s))

    def release(self, lease: Lease) -> None:
        held = self._current(lease.name)
        if held is not None and held.lease == lease:
            del self._held[lease.name]

    def commit(self, lease: Lease, commit: Commit) -> None:
        acknowledged = [
            (stream, group, [number_of(position) for position in positions])
            for (stream, group), positions in commit.acknowledge.items()
        ]
        held = self._current(lease.name)
        if held is None or held.lease != lease:
            holder = f"{held.lease.epoch} {held.lease.holder}" if held else "no holder"
            raise StaleEpoch(
                f"{lease.holder} no longer holds the lease {lease.name!r} under epoch {lease.epoch} (now: {holder}); "
                "nothing was written"
            )
        parts = self._snapshots.setdefault(lease.name, {})
        for part, value in commit.snapshot.items():
            if value is None:
                parts.pop(part, None)
            else:
                parts[part] = value
        for stream, entry in commit.append:
            self._add(stream, entry)
        for stream, group, numbers in acknowledged:
            self._acknowledge(stream, group, numbers)

    def snapshot(self, name: str) -> Mapping[str, bytes]:
        return dict(self._snapshots.get(name, {}))

    # ------------------------------------------------------------------ failures

    def delete_stream(self, stream: str) -> None:
        """Delete a stream with its groups, also while it is being read."""
        self._streams.pop(stream, None)

    def trim(self, stream: str, length: int) -> None:
        """Keep only the newest `length` entries, pending or not."""
        self._streams[stream].trim(length)

    def flush(self) -> None:
        """Lose everything: streams, groups, leases and snapshots."""
        self._streams.clear()
        self._held.clear()
        self._snapshots.clear()
        self._renewals.clear()

    # ------------------------------------------------------------------ inside

    def _add(self, stream: str, entry: Entry) -> str:
        held = self._streams.setdefault(stream, _Stream())
        number = next(self._numbers)
        held.add(number, entry, self._clock())
        held.trim(self._stream_length_max)
        held.trim_bytes(self._stream_bytes_max)
        return _position(number)

    def _group(self, stream: str, group: str, start: str = "0") -> _Group:
        """Return the group; creates it if it does not exist, from the beginning after a deletion."""
        held = self._streams.setdefault(stream, _Stream())
        if group not in held.groups:
            newest = held.numbers[-1] if held.numbers else 0
            held.groups[group] = _Group(newest if start == "$" else 0 if start == "0" else number_of(start))
        return held.groups[group]

    def _new(self, streams: Iterable[str], group: str, consumer: str, count: int) -> list[Delivery]:
        batch = []
        for stream in streams:
            reader = self._group(stream, group)
            for number in self._streams[stream].after(reader.last, count):
                reader.last = number
                reader.pending[number] = _Pending(consumer, self._clock(), 1)
                held = self._streams[stream]
                batch.append(Delivery(stream, _position(number), held.entries[number], age_s=self._age_s(held, number)))
        return batch

    def _own_pending(self, cursors: dict[str, int], group: str, consumer: str, count: int) -> list[Delivery]:
        """Return entries that this consumer left pending earlier; after an empty answer, never again."""
        for stream, cursor in list(cursors.items()):
            pending = self._group(stream, group).pending
            mine = sorted(number for number, each in pending.items() if each.consumer == consumer and number > cursor)
            if mine:
                cursors[stream] = mine[:count][-1]
                if batch := self._hand_out_again(stream, group, consumer, mine[:count]):
                    return batch
            else:
                del cursors[stream]
        return []

    def _abandoned(self, streams: Iterable[str], group: str, consumer: str, count: int) -> list[Delivery]:
        limit_s = self._clock() - self._reclaim_after_s
        for stream in streams:
            pending = self._group(stream, group).pending
            idle = sorted(number for number, each in pending.items() if each.since_s <= limit_s)
            if batch := self._hand_out_again(stream, group, consumer, idle[:count]):
                return batch
        return []

    def _hand_out_again(self, stream: str, group: str, consumer: str, numbers: Sequence[int]) -> list[Delivery]:
        """Skip trimmed entries; move entries with too many deliveries to the dead-letter stream."""
        batch = []
        pending, entries = self._group(stream, group).pending, self._streams[stream].entries
        for number in numbers:
            each = pending[number]
            if number not in entries:
                del pending[number]
            elif each.deliveries >= self._deliveries_max:
                del pending[number]
                self._add(stream + DEAD_SUFFIX, entries[number])
            else:
                pending[number] = replace(
                    each, consumer=consumer, since_s=self._clock(), deliveries=each.deliveries + 1
                )
                age_s = self._age_s(self._streams[stream], number)
                batch.append(Delivery(stream, _position(number), entries[number], each.deliveries + 1, age_s))
        return batch

    def _acknowledge(self, stream: str, group: str, numbers: Iterable[int]) -> None:
        held = self._streams.get(stream)
        if held is not None and group in held.groups:
            for number in numbers:
                held.groups[group].pending.pop(number, None)
            if stream in self._consumed:
                held.trim_consumed()

    def _age_s(self, held: _Stream, number: int) -> float:
        """By the log's clock, which may have been set back since the entry was appended."""
        return max(0.0, self._clock() - held.since_s[number])

    def _current(self, name: str) -> _Held | None:
        held = self._held.get(name)
        return held if held is not None and held.until_s > self._clock() else None


@dataclass(slots=True)
class Reader:
    """One consumer of a group, as `EventLog.subscribe` describes it."""

    _log: Streams
    _streams: tuple[str, ...]
    _group: str
    _consumer: str
    _count: int  # per stream
    reclaim_at_s: float = 0.0  # when the reader looks for abandoned entries again
    # position up to which this consumer's own pending entries were delivered again
    _own: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self._own = dict.fromkeys(self._streams, 0)

    def take(self) -> list[Delivery]:
        """Return the next batch: entries that this consumer or a dead one left pending, otherwise new ones."""
        log, now = self._log, self._log._clock()
        batch = log._own_pending(self._own, self._group, self._consumer, self._count)
        if not batch and now >= self.reclaim_at_s:
            batch = log._abandoned(self._streams, self._group, self._consumer, self._count)
            if not batch:
                self.reclaim_at_s = now + log._reclaim_after_s / RECLAIM_CHECKS
        return batch or self.take_new()

    def take_new(self) -> list[Delivery]:
        return self._log._new(self._streams, self._group, self._consumer, self._count)


def _size(entry: Entry) -> int:
    return len(entry.id) + len(entry.type) + len(entry.traceparent) + len(entry.data)


def _position(number: int) -> str:
    return f"{number}-0"


def number_of(position: str) -> int:
    number, _, sequence = position.partition("-")
    if not (number.isdecimal() and sequence.isdecimal()):
        raise InvalidSpec("position", position, "a stream position such as '1700000000000-0'")
    return int(number)
