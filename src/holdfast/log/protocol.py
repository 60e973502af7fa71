"""The event log: the guarantees of every implementation.

A *stream* is an ordered, bounded list of entries. A *group* of consumers shares a stream: each entry is delivered to one
consumer at a time, stays *pending* until acknowledged, is taken over when its consumer has been silent for
`reclaim_after_s`, and goes to `<stream>.dead` after `deliveries_max` tries. Delivery is at least once, so consumers are
idempotent on `Entry.id`.

The supervisor's writes go through `FencedLog.commit`: in one atomic step it checks that the caller still holds the lease
under its epoch, stores the changed parts of the snapshot, appends entries and acknowledges input. A crash at any point leaves
either all of this or none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from holdfast.domain.errors import Unavailable

OnTrouble = Callable[[str], None]

CANDIDATE_S: Final = 3.0  # a standby requests the lease several times a second


def ignore(reason: str) -> None:
    """Do nothing about trouble."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry to append. `id` makes it idempotent; `type` and `traceparent` are plain fields, readable in redis-cli."""

    id: str
    type: str
    data: bytes
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class Delivery:
    """An entry with its position and its number of deliveries."""

    stream: str
    position: str  # the id in the stream, e.g. "1700000000000-0"
    entry: Entry
    deliveries: int = 1
    age_s: float = 0.0  # seconds since it was appended, by the log's clock


@dataclass(frozen=True, slots=True)
class Lease:
    """Leadership. `epoch` grows with every change of holder and fences all writes of the holder."""

    name: str
    holder: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Renewal:
    """The last renewal of a lease that recorded the holder's time."""

    at: float  # the holder's time
    ago_s: float  # since then, by the log's clock; 0.0 if that clock was set back


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
    """The memory in use and its limit."""

    used_bytes: int = 0
    limit_bytes: int = 0  # 0 = no limit
    full: bool = False  # writes are rejected


class LostData(Unavailable):
    """The log knows of no holder of the lease as late as one that this client has seen, or of none at all."""


class EventLog(Protocol):
    """Streams with consumer groups."""

    async def append(self, stream: str, *entries: Entry) -> list[str]:
        """Append in order; returns the positions. The stream is trimmed to about `stream_length_max` entries and
        `stream_bytes_max`."""

    def subscribe(
        self,
        *streams: str,
        group: str,
        consumer: str,
        batch_max: int = 256,
        start: str = "0",
        on_trouble: OnTrouble = ignore,
    ) -> AsyncIterator[list[Delivery]]:
        """Yield batches for this consumer indefinitely: first entries that it (or a dead consumer) left pending, then new ones.

        A consumer that restarts under its old name gets its pending entries at once; under a new name, after
        `reclaim_after_s`. Consumers of which only one is active, such as leaders, therefore share one name. `batch_max` counts
        all streams together. An entry that is not acknowledged within `reclaim_after_s` is delivered again. If a group or
        stream is deleted, it is created again and reading continues. `start` "$" skips history when the group is new. After
        `block_s` without entries, an empty batch is yielded, so that the caller's loop keeps running. `on_trouble` is called
        with the reason when entries cannot be read, which is tried again until they can, and with "" when they are."""

    async def acknowledge(self, stream: str, group: str, *positions: str) -> None:
        """Acknowledge entries. In a stream that only groups read (`names.CONSUMED`), entries that all groups have
        acknowledged are removed."""

    async def read(
        self, stream: str, *, after: str = "0", count: int = 1000, block_s: float | None = None
    ) -> list[Delivery]:
        """Plain read without a group, e.g. for projections and SSE. `after` "$" with `block_s` waits for new entries."""

    async def last_position(self, stream: str) -> str:
        """Return the position of the newest entry; "0" if the stream is empty."""

    async def backlog(self, stream: str, group: str) -> Backlog:
        """Return the backlog of the group; empty if the stream or group does not exist yet."""

    async def usage(self) -> Usage:
        """Return the memory use of the log, for all clients."""

    async def lifetime(self) -> str:
        """Return the id of this lifetime of the log's server, which changes with each start."""

    async def ping(self) -> None:
        """Raise `Unavailable` with the address if the log cannot be reached."""

    async def aclose(self) -> None: ...


class FencedLog(EventLog, Protocol):
    """An event log that can elect one leader and fence its writes."""

    async def acquire(self, name: str, holder: str, ttl_s: float, *, begin: bool = True) -> Lease | None:
        """Take the lease if it is free or expired (a new epoch) or already held by `holder` (same epoch, extended). With
        `begin` False, a log that has never had a holder, or has lost data, is left as it is: raises `LostData`.

        `holder` identifies one lifetime of one process; two processes with the same name would share the lease. Epochs only
        grow, with gaps: a new one is above all that were seen here, even if the log has lost them. An unsuccessful request
        shortens the remaining time of the lease to `ttl_s`, which is the same for all holders. So the lease ends in time even
        if the server's clock was changed."""

    def newest_epoch(self, name: str) -> int:
        """Return the highest epoch of the lease that requests from here have seen; 0 = none."""
        ...

    async def candidate(self, name: str) -> str:
        """Return a holder that has requested the lease without success within the last `CANDIDATE_S`; "" if there is none. This
        may be the present holder."""

    async def renew(self, lease: Lease, ttl_s: float, at: float | None = None) -> bool:
        """Extend the lease. Returns False if it has been lost; the holder must then stop acting immediately. `at`: the holder's
        time, which the log records for its successors."""

    async def last_renewal(self, name: str) -> Renewal | None:
        """Return the last renewal by any holder that recorded its time; None if there is none. It outlives the lease."""

    async def release(self, lease: Lease) -> None:
        """Release the lease, so that a standby does not have to wait for its expiry."""

    async def commit(self, lease: Lease, commit: Commit) -> None:
        """Commit atomically. Raises `StaleEpoch` if the lease is no longer held, or if the log has lost this holder's previous
        commit, because commits are differences."""

    async def snapshot(self, name: str) -> Mapping[str, bytes]:
        """Return all committed parts of the lease `name`; empty if there are none.

        The first version stored a single value. That value is the part named "", so that its reader can refuse it.
        """
