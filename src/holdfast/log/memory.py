"""The event log in this process's memory, with the same guarantees as on Redis, for tests and simulation.

It passes the same contract suite as `RedisLog`. Its time is the event loop's, so under a virtual clock a lease expires and an
entry is reclaimed without real time. Code between two awaits is atomic, as a Lua script is on Redis. `delete_stream` and
`flush` simulate an operator or a fault. The contents are in `Streams`.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Collection, Mapping

import anyio
from anyio.lowlevel import checkpoint

from holdfast.log import names
from holdfast.log.protocol import Backlog, Commit, Delivery, Entry, Lease, OnTrouble, Renewal, Usage, ignore
from holdfast.log.streams import Streams


class MemoryLog:
    """A `FencedLog` without a server. All users of the same streams share one instance."""

    def __init__(
        self,
        *,
        stream_length_max: int = 100_000,
        stream_bytes_max: int = 128 * 2**20,
        reclaim_after_s: float = 5.0,
        deliveries_max: int = 5,
        block_s: float = 0.5,
        consumed: Collection[str] = names.CONSUMED,
    ) -> None:
        self._streams = Streams(
            anyio.current_time,
            stream_length_max=stream_length_max,
            stream_bytes_max=stream_bytes_max,
            reclaim_after_s=reclaim_after_s,
            deliveries_max=deliveries_max,
            consumed=consumed,
        )
        self._block_s = block_s
        self._lifetime = uuid.uuid4().hex
        self._appended = anyio.Event()

    # ------------------------------------------------------------------ streams

    async def append(self, stream: str, *entries: Entry) -> list[str]:
        await checkpoint()
        positions = self._streams.append(stream, *entries)
        self._announce()
        return positions

    async def subscribe(
        self,
        *streams: str,
        group: str,
        consumer: str,
        batch_max: int = 256,
        start: str = "0",
        on_trouble: OnTrouble = ignore,
    ) -> AsyncIterator[list[Delivery]]:
        reader = self._streams.reader(*streams, group=group, consumer=consumer, batch_max=batch_max, start=start)
        while True:
            await checkpoint()
            batch = reader.take()
            if not batch:
                await self._wait_for_entries(min(self._block_s, reader.reclaim_at_s - anyio.current_time()))
                batch = reader.take_new()
            yield batch

    async def acknowledge(self, stream: str, group: str, *positions: str) -> None:
        await checkpoint()
        self._streams.acknowledge(stream, group, *positions)

    async def read(
        self, stream: str, *, after: str = "0", count: int = 1000, block_s: float | None = None
    ) -> list[Delivery]:
        if after == "$":
            after = await self.last_position(stream)
        deadline = anyio.current_time() + (block_s or 0.0)
        while True:
            await checkpoint()
            if found := self._streams.after(stream, after, count):
                return found
            if anyio.current_time() >= deadline:
                return []
            await self._wait_for_entries(deadline - anyio.current_time())

    async def last_position(self, stream: str) -> str:
        await checkpoint()
        return self._streams.last_position(stream)

    async def backlog(self, stream: str, group: str) -> Backlog:
        await checkpoint()
        return self._streams.backlog(stream, group)

    # ------------------------------------------------------------------ leadership

    async def acquire(self, name: str, holder: str, ttl_s: float, *, begin: bool = True) -> Lease | None:
        await checkpoint()
        return self._streams.acquire(name, holder, ttl_s, begin=begin)

    def newest_epoch(self, name: str) -> int:
        return self._streams.newest_epoch(name)

    async def candidate(self, name: str) -> str:
        await checkpoint()
        return self._streams.candidate(name)

    async def renew(self, lease: Lease, ttl_s: float, at: float | None = None) -> bool:
        await checkpoint()
        return self._streams.renew(lease, ttl_s, at)

    async def last_renewal(self, name: str) -> Renewal | None:
        await checkpoint()
        return self._streams.last_renewal(name)

    async def release(self, lease: Lease) -> None:
        await checkpoint()
        self._streams.release(lease)

    async def commit(self, lease: Lease, commit: Commit) -> None:
        await checkpoint()
        self._streams.commit(lease, commit)
        self._announce()

    async def snapshot(self, name: str) -> Mapping[str, bytes]:
        await checkpoint()
        return self._streams.snapshot(name)

    async def usage(self) -> Usage:
        await checkpoint()
        return Usage(self._streams.size_bytes)

    async def lifetime(self) -> str:
        await checkpoint()
        return self._lifetime

    async def ping(self) -> None:
        await checkpoint()

    async def aclose(self) -> None:
        await checkpoint()

    # ------------------------------------------------------------------ failures, for tests

    def delete_stream(self, stream: str) -> None:
        """Delete a stream with its groups, also while it is being read."""
        self._streams.delete_stream(stream)
        self._announce()

    def trim(self, stream: str, length: int) -> None:
        """Keep only the newest `length` entries, pending or not."""
        self._streams.trim(stream, length)

    def flush(self) -> None:
        """Lose everything: streams, groups, leases and snapshots."""
        self._streams.flush()
        self._announce()

    # ------------------------------------------------------------------ inside

    def _announce(self) -> None:
        self._appended.set()
        self._appended = anyio.Event()

    async def _wait_for_entries(self, timeout_s: float) -> None:
        with anyio.move_on_after(max(0.0, timeout_s)):
            await self._appended.wait()
