"""The event log: what every implementation promises, and the two traps that each must survive.

A *stream* is an ordered, bounded list of entries. A *group* of consumers shares a stream: each entry is delivered to one
consumer at a time, stays *pending* until acknowledged, is taken over when its consumer has been silent for
`reclaim_after_s`, and goes to `<stream>.dead` after `deliveries_max` tries. Delivery is at least once, so consumers are
idempotent on `Entry.id`.

The supervisor's writes go through `FencedLog.commit`: in one atomic step it checks that the caller still holds the lease
under its epoch, stores the changed parts of the snapshot, appends entries and acknowledges input. A crash anywhere leaves
either all or nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """What is written. `id` makes it idempotent; `type` and `traceparent` stay plain fields, readable in redis-cli."""

    id: str
    type: str
    data: bytes
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Delivery:
    """An entry with its position and its number of deliveries."""

    stream: str
    position: str  # the stream's own id, e.g. "1700000000000-0"
    entry: Entry
    deliveries: int = 1
    age_s: float = 0.0  # since it was appended, by the log's own clock; of subscriptions only


@dataclass(frozen=True, slots=True)
class Lease:
    """Leadership: `epoch` grows with every change of holder and fences everything that the holder writes."""

    name: str
    holder: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Commit:
    """One atomic write of a leader."""

    snapshot: Mapping[str, bytes | None] = field(default_factory=dict)  # parts to write by name; None = to remove
    append: Sequence[tuple[str, Entry]] = ()  # (stream, entry)
    acknowledge: Mapping[tuple[str, str], Sequence[str]] = field(default_factory=dict)  # (stream, group) → positions


@dataclass(frozen=True, slots=True)
class Backlog:
    """Backlog of a group: entries delivered and not acknowledged, and the age of the oldest undelivered entry."""

    pending: int = 0
    lag_s: float = 0.0  # 0 = everything has been delivered


@dataclass(frozen=True, slots=True)
class Usage:
    """What the log takes of the memory that it may take."""

    used_bytes: int = 0
    limit_bytes: int = 0  # 0 = no limit


class EventLog(Protocol):
    """Streams with consumer groups."""

    async def append(self, stream: str, *entries: Entry) -> list[str]:
        """Append in order; returns the positions. The stream keeps about `stream_length_max` entries of `stream_bytes_max`."""

    def subscribe(
        self, *streams: str, group: str, consumer: str, batch_max: int = 256, start: str = "0"
    ) -> AsyncIterator[list[Delivery]]:
        """Yield batches for this consumer indefinitely: first entries that it (or a dead consumer) left pending, then new ones.

        A consumer that restarts under its old name gets its pending entries at once; under a new name, after
        `reclaim_after_s`. Consumers of which only one is active, such as leaders, therefore share one name. `batch_max` counts
        all streams together. An entry that is not acknowledged comes back after `reclaim_after_s`: acknowledge before that, or
        expect it twice. If a group or stream is deleted, it is created again and reading continues. `start` "$" skips history
        when the group is new. After `block_s` without entries, an empty batch is yielded, so that the caller's loop keeps
        running."""

    async def acknowledge(self, stream: str, group: str, *positions: str) -> None:
        """Done with these. Of a stream that only groups read (`names.CONSUMED`) goes what all of them are done with."""

    async def read(
        self, stream: str, *, after: str = "0", count: int = 1000, block_s: float | None = None
    ) -> list[Delivery]:
        """Plain read without a group, e.g. for projections and SSE. `after` "$" with `block_s` waits for new entries."""

    async def last_position(self, stream: str) -> str:
        """Position of the newest entry; "0" when the stream is empty."""

    async def backlog(self, stream: str, group: str) -> Backlog:
        """Return the backlog of the group; empty if the stream or group does not exist yet."""

    async def usage(self) -> Usage:
        """Return the memory use of the log, for all clients."""

    async def ping(self) -> None:
        """Raise `Unavailable`, naming the address, when the log cannot be reached."""

    async def aclose(self) -> None: ...


class FencedLog(EventLog, Protocol):
    """An event log that can elect one leader and fence its writes."""

    async def acquire(self, name: str, holder: str, ttl_s: float) -> Lease | None:
        """Take the lease when it is free or expired (a new epoch) or already held by `holder` (same epoch, extended).

        `holder` identifies one lifetime of one process; two processes with the same name would share the lease. Epochs only
        grow, with gaps."""

    async def renew(self, lease: Lease, ttl_s: float) -> bool:
        """Extend; False when it has been lost: stop acting at once."""

    async def release(self, lease: Lease) -> None:
        """Give it back, so that a standby need not wait."""

    async def commit(self, lease: Lease, commit: Commit) -> None:
        """Commit atomically. Raises `StaleEpoch` if the lease is no longer held, or if the log has lost this holder's previous
        commit, because commits are differences."""

    async def snapshot(self, name: str) -> Mapping[str, bytes]:
        """All parts that stand committed under the lease `name`; empty when there are none.

        An earlier version kept one value for everything: until a commit writes parts, it is the part named "".
        """
