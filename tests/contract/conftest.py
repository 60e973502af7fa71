"""The logs that the contract suites run on: every test that takes `bench` runs on memory and on a real Redis, there without
users and as the user `supervisor` of the chart's Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import redis
import redis_users
from eventlogs import FLEET, Bench, MemoryBench, RedisBench
from servers import RedisServer

from holdfast.log.protocol import FencedLog

PATIENCE_S = 30.0


@pytest.fixture(params=["memory", "redis", "redis user"])
def make_bench(request: pytest.FixtureRequest) -> Callable[..., Bench]:
    if request.param == "memory":
        return MemoryBench
    url: str = request.getfixturevalue("redis_url")
    if request.param == "redis":
        return lambda **limits: RedisBench(url, **limits)
    users: Mapping[str, str] = request.getfixturevalue("user_urls")
    return lambda **limits: RedisBench(url, client_url=users["supervisor"], **limits)


@pytest.fixture(scope="session")
def user_urls(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """The server's URL by user, with the rights that the chart's Redis gives them."""
    with redis.Redis.from_url(redis_server.url) as client:
        for line in redis_users.acl(tmp_path_factory.mktemp("users"), FLEET):
            _, user, *rules = line.split()
            if user in redis_users.PASSWORDS:
                client.execute_command("ACL", "SETUSER", user, *rules)
    place = redis_server.url.removeprefix("redis://")
    return {user: f"redis://{user}:{password}@{place}" for user, password in redis_users.PASSWORDS.items()}


@pytest.fixture
async def bench(make_bench: Callable[..., Bench]) -> AsyncIterator[Bench]:
    """What is pending stays so for the length of a test, however slow the machine."""
    bench = make_bench(reclaim_after_s=5 * PATIENCE_S)
    yield bench
    await bench.aclose()


@pytest.fixture
async def hasty_bench(make_bench: Callable[..., Bench]) -> AsyncIterator[Bench]:
    """Reclaims what is pending within a fraction of a second."""
    bench = make_bench()
    yield bench
    await bench.aclose()


@pytest.fixture
async def patient_bench(make_bench: Callable[..., Bench]) -> AsyncIterator[Bench]:
    """Waits for half a minute in one go: what comes sooner has woken it."""
    bench = make_bench(reclaim_after_s=5 * PATIENCE_S, block_s=PATIENCE_S)
    yield bench
    await bench.aclose()


@pytest.fixture
def log(bench: Bench) -> FencedLog:
    return bench.open()
