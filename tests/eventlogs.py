"""Event logs under test: the same few handles on a memory log and on a real Redis, so that one suite runs on both."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any, Protocol

import anyio
from redis import asyncio as aioredis
from waiting import TIMEOUT_S, wait_until_async

from holdfast.log.keys import Keys
from holdfast.log.memory import MemoryLog
from holdfast.log.protocol import Delivery, Entry, FencedLog
from holdfast.log.redis import RedisLog

FLEET = "test"
RECLAIM_AFTER_S = 0.2
DELIVERIES_MAX = 3
BLOCK_S = 0.05
GROUP = "readers"


class Bench(Protocol):
    """A log, and what operators and faults do to it behind its back."""

    def open(self) -> FencedLog:
        """Another client of the same data."""

    async def delete_stream(self, stream: str) -> None: ...

    async def trim(self, stream: str, length: int) -> None: ...

    async def flush(self) -> None: ...

    async def until_someone_waits(self) -> None:
        """A reader is waiting for entries inside the log at this moment."""

    async def aclose(self) -> None: ...


class MemoryBench:
    def __init__(
        self,
        *,
        reclaim_after_s: float = RECLAIM_AFTER_S,
        deliveries_max: int = DELIVERIES_MAX,
        block_s: float = BLOCK_S,
        **more: Any,
    ) -> None:
        self._log = MemoryLog(reclaim_after_s=reclaim_after_s, deliveries_max=deliveries_max, block_s=block_s, **more)

    def open(self) -> FencedLog:
        return self._log

    async def delete_stream(self, stream: str) -> None:
        self._log.delete_stream(stream)

    async def trim(self, stream: str, length: int) -> None:
        self._log.trim(stream, length)

    async def flush(self) -> None:
        self._log.flush()

    async def until_someone_waits(self) -> None:
        await anyio.wait_all_tasks_blocked()

    async def aclose(self) -> None:
        await self._log.aclose()


class RedisBench:
    def __init__(self, url: str, *, client_url: str = "", **limits: Any) -> None:
        """`limits` as for `redis_log`. `client_url`: of the logs; `url` is what operators and faults use."""
        self._open = partial(redis_log, client_url or url, **limits)
        self._keys = Keys(FLEET)
        self._opened: list[RedisLog] = []
        self.redis = aioredis.Redis.from_url(url)

    def open(self) -> FencedLog:
        log = self._open()
        self._opened.append(log)
        return log

    async def delete_stream(self, stream: str) -> None:
        await self.redis.delete(self._keys.stream(stream))

    async def trim(self, stream: str, length: int) -> None:
        await self.redis.xtrim(self._keys.stream(stream), maxlen=length, approximate=False)

    async def flush(self) -> None:
        await self.redis.flushall()

    async def until_someone_waits(self) -> None:
        async def waiting() -> bool:
            return bool((await self.redis.info("clients"))["blocked_clients"])

        await wait_until_async(waiting, description="a blocked read")

    async def aclose(self) -> None:
        for log in self._opened:
            await log.aclose()
        await self.redis.aclose()


def redis_log(
    url: str,
    *,
    reclaim_after_s: float = RECLAIM_AFTER_S,
    deliveries_max: int = DELIVERIES_MAX,
    block_s: float = BLOCK_S,
    **more: Any,
) -> RedisLog:
    """A Redis log with the limits of the tests: short enough to see each of them at work."""
    return RedisLog(url, FLEET, reclaim_after_s=reclaim_after_s, deliveries_max=deliveries_max, block_s=block_s, **more)


def entry(name: str) -> Entry:
    return Entry(id=name, type="test", data=name.encode(), traceparent="00-1-2-01")


def entries(count: int, *, prefix: str = "e") -> list[Entry]:
    return [entry(f"{prefix}{number}") for number in range(count)]


def names(deliveries: list[Delivery]) -> list[str]:
    return [delivery.entry.id for delivery in deliveries]


class Reader:
    """A consumer: `take` collects deliveries with a deadline; it acknowledges only when the test asks it to."""

    def __init__(
        self, log: FencedLog, *streams: str, consumer: str = "one", start: str = "0", batch_max: int = 256
    ) -> None:
        self._log = log
        self._batches: AsyncIterator[list[Delivery]] = log.subscribe(
            *streams, group=GROUP, consumer=consumer, start=start, batch_max=batch_max
        )

    async def batch(self) -> list[Delivery]:
        with anyio.fail_after(TIMEOUT_S):
            return await anext(self._batches)

    async def take(self, count: int, *, timeout_s: float = 20.0) -> list[Delivery]:
        """At least `count` deliveries."""
        taken: list[Delivery] = []
        with anyio.fail_after(timeout_s):
            while len(taken) < count:
                taken += await anext(self._batches)
        return taken

    async def take_and_acknowledge(self, count: int) -> list[Delivery]:
        """At least `count`, each batch acknowledged before the next is asked for."""
        taken: list[Delivery] = []
        while len(taken) < count:
            batch = await self.batch()
            await self.acknowledge(batch)
            taken += batch
        return taken

    async def acknowledge(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            await self._log.acknowledge(delivery.stream, GROUP, delivery.position)

    async def idle(self, batches: int = 2) -> None:
        """Nothing comes for that many empty batches."""
        for _ in range(batches):
            assert await self.batch() == []


async def read_all(log: FencedLog, stream: str) -> list[str]:
    return names(await log.read(stream))


async def drain_until(log: FencedLog, reader: Reader, stream: str, count: int) -> list[str]:
    """Keep reading, without acknowledging, until `stream` holds `count` entries: how poison meets its end."""
    with anyio.fail_after(TIMEOUT_S):
        while len(found := await read_all(log, stream)) < count:
            await reader.batch()
    return found
