"""More readers of the events than a supervisor may have connections, to Redis and to the leader: all that is asked meanwhile is
answered, and each reader gets what happens."""

from __future__ import annotations

from pathlib import Path

import anyio
import httpx
import pytest
from eventlogs import redis_log
from redis import asyncio as aioredis
from supervising import job_body, start_supervisor
from waiting import wait_until_async

from holdfast.log.connection import CONNECTIONS_MAX

pytestmark = pytest.mark.anyio

RETRY_S = 0.1
READERS = CONNECTIONS_MAX + 30  # from now on, and from the first event on


@pytest.mark.parametrize("asked", ["leader", "standby"])
async def test_readers_do_not_take_connections_away(redis_url: str, tmp_path: Path, asked: str) -> None:
    open_streams, told = set[int](), set[int]()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with aioredis.Redis.from_url(redis_url) as redis, anyio.create_task_group() as tasks:
        read = await start_supervisor(tasks, tmp_path / "a", redis_log(redis_url), name="a")
        if asked == "standby":
            read = await start_supervisor(tasks, tmp_path / "b", redis_log(redis_url), name="b")
        async with read.client(limits=limits) as client:

            async def reader(number: int) -> None:
                headers = {"Last-Event-ID": "0"} if number % 2 else {}
                while True:
                    async with client.stream("GET", "/v1/events", headers=headers) as answer:
                        assert answer.status_code in (200, 503)
                        if answer.status_code == 200:
                            open_streams.add(number)
                        async for line in answer.aiter_lines():
                            if '"awaited"' in line:
                                told.add(number)
                                return
                    # Redis did not answer in time, as on a machine without a free processor: asked again, as browsers do.
                    open_streams.discard(number)
                    headers = {"Last-Event-ID": "0"}
                    await anyio.sleep(RETRY_S)

            for number in range(READERS):
                tasks.start_soon(reader, number)
            await wait_until_async(lambda: len(open_streams) == READERS, description="every stream")
            assert (await redis.info("clients"))["blocked_clients"] < 10
            await read.post("/v1/jobs", job_body(name="awaited"))
            await wait_until_async(lambda: len(told) == READERS, description="every reader to be told")
        tasks.cancel_scope.cancel()
