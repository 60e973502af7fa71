"""The event log on Redis Streams (>= 6.2): consumer groups, a lease with an epoch, and the fenced commit.

Every change that must be atomic is one Lua script (see `scripts`). `connection` handles failures and retries.
Under plain asyncio on Python 3.11, redis-py 8 can swallow a task's cancellation; anyio delivers it again, so callers live in
anyio task groups.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

import anyio
from anyio.abc import TaskStatus
from anyio.lowlevel import checkpoint

from holdfast.domain.errors import InvalidSpec, StaleEpoch, Unavailable
from holdfast.log import durability, names, scripts
from holdfast.log.connection import Connection, GroupGone
from holdfast.log.keys import Keys
from holdfast.log.protocol import (
    CANDIDATE_S,
    Backlog,
    Commit,
    Delivery,
    Entry,
    Lease,
    LostData,
    OnTrouble,
    Renewal,
    Usage,
    ignore,
)
from holdfast.log.redis_server import RedisServer
from holdfast.log.refusals import Full
from holdfast.log.subscription import Limits, Subscription, aged, decode, milliseconds
from holdfast.runtime.rpc.backoff import Backoff
from holdfast.runtime.telling.refusal_log import Repeats

logger = logging.getLogger(__name__)

STREAM_BYTES_MAX = 128 * 2**20
MEMORY_SHARE = 16  # a stream uses at most 1/16 of a limited memory, because there are seven streams and the snapshot
# lower bound of the limit, so that unread entries are not dropped for a limit of a few bytes
STREAM_BYTES_MIN = 4 * 2**20
LIMIT_GOOD_S = 60.0  # seconds for which the server's memory limit is cached
APPENDED_SHARE = 64  # the size of a stream is checked after each such part of its limit
SAY_AGAIN_S = 30.0  # why Redis does not serve yet is logged again after this time

T = TypeVar("T")

_POSITION = re.compile(r"[0-9]{1,19}-[0-9]{1,19}")


class RedisLog:
    """A `FencedLog`. `block_s`: seconds that a subscription waits before it yields an empty batch; a new entry wakes it
    immediately."""

    def __init__(
        self,
        url: str,
        fleet: str,
        *,
        stream_length_max: int = 100_000,
        stream_bytes_max: int = STREAM_BYTES_MAX,
        reclaim_after_s: float = 5.0,
        deliveries_max: int = 5,
        block_s: float = 2.0,
        consumed: Collection[str] = names.CONSUMED,
    ) -> None:
        """Connects on first use. Raises `InvalidSpec` for a malformed URL or fleet name."""
        self._keys = Keys(fleet)
        self._consumed = frozenset(consumed)
        self._stream_bytes_max = stream_bytes_max
        self._limit: tuple[float, int] = (-LIMIT_GOOD_S, 0)  # (time of the query, the server's memory limit in bytes)
        self._appended_bytes: dict[str, int] = {}  # by stream: bytes appended since its size was checked
        self._limits = Limits(
            stream_length_max=stream_length_max,
            reclaim_after_s=reclaim_after_s,
            deliveries_max=deliveries_max,
            block_s=block_s,
        )
        self._connection = Connection(url, block_s=block_s)
        self.server = RedisServer(self._connection)
        self._call = self._connection.call
        self._redis = self._connection.redis
        self._acquire = self._redis.register_script(scripts.ACQUIRE)
        self._renew = self._redis.register_script(scripts.RENEW)
        self._last_renewal = self._redis.register_script(scripts.LAST_RENEWAL)
        self._release = self._redis.register_script(scripts.RELEASE)
        self._commit = self._redis.register_script(scripts.COMMIT)
        self._backlog = self._redis.register_script(scripts.BACKLOG)
        self._trim = self._redis.register_script(scripts.TRIM)
        self._seen: dict[str, tuple[int, str]] = {}  # lease → highest epoch, and the last renewal by another holder
        self._committed: dict[Lease, str] = {}  # lease → token of its last commit

    # ------------------------------------------------------------------ streams

    async def append(self, stream: str, *entries: Entry) -> list[str]:
        if not entries:
            await checkpoint()  # so that a caller's loop can be cancelled here
            return []
        key = self._keys.stream(stream)

        async def add() -> list[bytes]:
            async with self._redis.pipeline(transaction=True) as pipeline:
                for entry in entries:
                    pipeline.xadd(key, _fields(entry), maxlen=self._limits.stream_length_max, approximate=True)
                return await pipeline.execute()

        positions = await self._growing(add)
        await self._bound(stream, sum(len(entry.data) for entry in entries))
        return [position.decode() for position in positions]

    async def subscribe(
        self,
        *streams: str,
        group: str,
        consumer: str,
        batch_max: int = 256,
        start: str = "0",
        on_trouble: OnTrouble = ignore,
    ) -> AsyncIterator[list[Delivery]]:
        subscription = Subscription(
            self._connection,
            self._keys,
            self._limits,
            streams=streams,
            group=group,
            consumer=consumer,
            batch_max=batch_max,
            start=start,
            on_trouble=on_trouble,
        )
        while True:
            yield await subscription.next_batch()

    async def acknowledge(self, stream: str, group: str, *positions: str) -> None:
        if not positions:
            await checkpoint()
            return
        key, checked = self._keys.stream(stream), _checked(positions)
        await self._call(lambda: self._redis.xack(key, group, *checked))
        if stream in self._consumed:
            await self._trim_streams(stream)

    async def read(
        self, stream: str, *, after: str = "0", count: int = 1000, block_s: float | None = None
    ) -> list[Delivery]:
        key = self._keys.stream(stream)
        if after == "$":  # resolved once, because an entry may arrive between two waits
            after = await self.last_position(stream)
        deadline = anyio.current_time() + (block_s or 0.0)
        while True:
            wait_s = min(self._limits.block_s, deadline - anyio.current_time())
            block_ms = max(1, round(wait_s * 1000)) if wait_s > 0 else None  # 0 would block indefinitely
            answer = await self._read_once(key, after, count, block_ms)
            deliveries = [each for position, fields in answer if (each := decode(stream, position, fields, 1))]
            if deliveries:
                now_ms = milliseconds(await self._call(self._redis.time))
                return [aged(each, now_ms) for each in deliveries]
            if not answer and block_ms is None:
                return []
            if answer:  # only undecodable entries; continue after them
                after = answer[-1][0].decode()

    async def _read_once(
        self, key: str, after: str, count: int, block_ms: int | None
    ) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
        try:
            answer: Any = await self._call(lambda: self._redis.xread({key: after}, count=count, block=block_ms))
        except GroupGone:  # the stream was deleted during the wait, so there are no entries
            return []
        return answer[0][1] if answer else []

    async def last_position(self, stream: str) -> str:
        key = self._keys.stream(stream)
        newest: Any = await self._call(lambda: self._redis.xrevrange(key, count=1))
        return str(newest[0][0].decode()) if newest else "0"

    async def backlog(self, stream: str, group: str) -> Backlog:
        key = self._keys.stream(stream)
        pending, oldest, now = await self._call(lambda: self._backlog(keys=[key], args=[group]))
        return Backlog(pending, max(0.0, now - int(oldest.partition(b"-")[0])) / 1000 if oldest else 0.0)

    # ------------------------------------------------------------------ leadership

    async def acquire(self, name: str, holder: str, ttl_s: float, *, begin: bool = True) -> Lease | None:
        keys = [self._keys.lease(name), self._keys.epoch(name), self._keys.candidate(name), self._keys.renewal(name)]
        seen, seen_renewal = self._seen.get(name, (0, "0"))
        known: tuple[int, str] = (0, "0") if begin else (max(1, seen), seen_renewal)
        args: list[str | int] = [holder, _milliseconds(ttl_s), _milliseconds(CANDIDATE_S), *known, seen]
        answer: Any = await self._growing(lambda: self._acquire(keys=keys, args=args))
        text, _, renewed = answer.decode().partition(" ")
        epoch, is_held = abs(int(text or 0)), text.startswith("-")
        if not epoch or (is_held and (epoch < seen or float(renewed) < float(seen_renewal))):
            raise LostData(
                f"Redis at {self._connection.address} has lost data: it does not know the last leader; wait some seconds "
                "until that supervisor has put its state back"
            )
        self._seen[name] = max(seen, epoch), renewed or seen_renewal
        return None if is_held else Lease(name=name, holder=holder, epoch=epoch)

    def newest_epoch(self, name: str) -> int:
        return self._seen.get(name, (0, ""))[0]

    async def candidate(self, name: str) -> str:
        holder: Any = await self._call(lambda: self._redis.get(self._keys.candidate(name)))
        return "" if holder is None else holder.decode(errors="replace")

    async def renew(self, lease: Lease, ttl_s: float, at: float | None = None) -> bool:
        keys = [self._keys.lease(lease.name), self._keys.renewal(lease.name)]
        args: list[str | int] = [_held(lease), _milliseconds(ttl_s), "" if at is None else repr(at)]
        return bool(await self._call(lambda: self._renew(keys=keys, args=args)))

    async def last_renewal(self, name: str) -> Renewal | None:
        record, now_us = await self._call(lambda: self._last_renewal(keys=[self._keys.renewal(name)]))
        if not record:
            return None
        at, _, renewed_at_us = record.decode().partition(" ")
        return Renewal(float(at), max(0, int(now_us) - int(renewed_at_us)) / 1e6)

    async def release(self, lease: Lease) -> None:
        keys = [self._keys.lease(lease.name)]
        await self._call(lambda: self._release(keys=keys, args=[_held(lease)]))

    async def commit(self, lease: Lease, commit: Commit) -> None:
        streams = list(dict.fromkeys([*(name for name, _ in commit.append), *(name for name, _ in commit.acknowledge)]))
        name = lease.name
        keys = [self._keys.lease(name), self._keys.parts(name), self._keys.commit(name), self._keys.snapshot(name)]
        index = {name: number for number, name in enumerate(streams, start=len(keys) + 1)}
        keys += map(self._keys.stream, streams)
        token, before = secrets.token_hex(16), self._committed.get(lease, "")
        args: list[str | int | bytes] = [_held(lease), token, before]
        consumed = "".join(str(int(stream in self._consumed)) for stream in streams)
        args += [self._limits.stream_length_max, await self._bytes_max(), consumed]
        args += [len(commit.snapshot), len(commit.append)]
        for part, value in commit.snapshot.items():
            args += [part, int(value is not None), value or b""]
        for name, entry in commit.append:
            args += [index[name], entry.id, entry.type, entry.traceparent, entry.data]
        for (name, group), positions in commit.acknowledge.items():
            for position in _checked(positions):
                args += [index[name], group, position]
        answer = await self._growing(lambda: self._commit(keys=keys, args=args))
        if answer == 0:
            raise StaleEpoch(
                f"Redis has lost the previous commit of {lease.holder}, probably in a restart: nothing was written; the "
                "supervisor loads the state again"
            )
        if answer != 1:
            holder = answer.decode(errors="replace") or "no holder"
            raise StaleEpoch(
                f"{lease.holder} no longer holds the lease {lease.name!r} under epoch {lease.epoch} (now: {holder}); "
                "nothing was written"
            )
        self._committed = {lease: token}

    async def snapshot(self, name: str) -> Mapping[str, bytes]:
        parts: Any = await self._call(lambda: self._redis.hgetall(self._keys.parts(name)))
        if parts:
            return {part.decode(): value for part, value in parts.items()}
        whole: Any = await self._call(lambda: self._redis.get(self._keys.snapshot(name)))
        return {} if whole is None else {"": whole}

    # ------------------------------------------------------------------ memory

    async def usage(self) -> Usage:
        memory: Any = await self._call(lambda: self._redis.info("memory"))
        used, limit = int(memory.get("used_memory", 0)), int(memory.get("maxmemory", 0))
        counted = used - int(memory.get("mem_not_counted_for_evict", 0))
        return Usage(used, limit, full=0 < limit < counted and not durability.evicting(memory))

    async def _bytes_max(self) -> int:
        """Return the memory limit of one stream."""
        asked_at_s, limit_bytes = self._limit
        if anyio.current_time() - asked_at_s >= LIMIT_GOOD_S:
            limit_bytes = (await self.usage()).limit_bytes
            self._limit = (anyio.current_time(), limit_bytes)
        if not limit_bytes:
            return self._stream_bytes_max
        return min(self._stream_bytes_max, max(STREAM_BYTES_MIN, limit_bytes // MEMORY_SHARE))

    async def _bound(self, stream: str, appended_bytes: int) -> None:
        """Check the size of a stream after a large amount has been appended to it."""
        appended_bytes += self._appended_bytes.get(stream, 0)
        self._appended_bytes[stream] = appended_bytes
        if appended_bytes >= await self._bytes_max() // APPENDED_SHARE:
            await self._trim_streams(stream)
            self._appended_bytes[stream] = 0

    async def _trim_streams(self, *streams: str) -> int:
        """Trim streams to their limits. Returns the number of removed entries."""
        keys = [self._keys.stream(stream) for stream in streams]
        args = [await self._bytes_max(), *(int(stream in self._consumed) for stream in streams)]
        gone, unread = await self._call(lambda: self._trim(keys=keys, args=args))
        if unread:
            logger.error(
                "%s: %d entries that had not been read were dropped because Redis is full", ", ".join(streams), unread
            )
        return int(gone)

    async def _growing(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Run a command that Redis rejects if its memory is full. Acknowledged entries are then removed to make room."""
        try:
            return await self._call(attempt)
        except Full:
            if not await self._trim_streams(*sorted(self._consumed)):
                raise
            return await self._call(attempt)

    # ------------------------------------------------------------------ the connection

    async def lifetime(self) -> str:
        return await self.server.lifetime()

    async def ping(self) -> None:
        await self._call(self._redis.ping, delays_s=())

    async def admit(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Wait until Redis serves, and log what it can lose. Started after the first attempt: a service begins meanwhile, so
        that its health checks answer. Raises `HoldfastError` if this is no Redis for Holdfast, such as a Sentinel."""
        backoff, repeats = Backoff(max_s=1.0), Repeats(SAY_AGAIN_S, anyio.current_time)
        waited = False
        while True:
            try:
                await self.ping()
                await self.server.require_data()
                risks = await self.risks()
                break
            except Unavailable as error:
                waited = True
                if repeats.is_due(str(error)):
                    logger.warning("waiting for Redis: %s", error)
                task_status.started()
                task_status = anyio.TASK_STATUS_IGNORED
                await backoff.sleep()
        if waited:
            logger.info("Redis serves now")
        for risk in risks:
            logger.warning("Redis may forget: %s; %s", risk.found, risk.advice)
        task_status.started()

    async def risks(self) -> Sequence[durability.Risk]:
        """Describe why this Redis refuses writes, or can lose data."""
        info: Any = await self._call(self._redis.info)
        return tuple(durability.risks(info))

    async def aclose(self) -> None:
        await self._connection.aclose()


def _fields(entry: Entry) -> dict[Any, Any]:
    return {"id": entry.id, "type": entry.type, "traceparent": entry.traceparent, "data": entry.data}


def _held(lease: Lease) -> str:
    return f"{lease.epoch} {lease.holder}"


def _milliseconds(ttl_s: float) -> int:
    return max(1, round(ttl_s * 1000))


def _checked(positions: Sequence[str]) -> Sequence[str]:
    """Raises for a malformed position, which would otherwise fail an acknowledgement in the middle of a commit."""
    for position in positions:
        if _POSITION.fullmatch(position) is None:
            raise InvalidSpec("position", position, "a stream position such as '1700000000000-0'")
    return positions
