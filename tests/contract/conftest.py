"""The logs that the contract suites run on: every test that takes `bench` runs on memory and on a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from eventlogs import Bench, MemoryBench, RedisBench

from holdfast.log.protocol import FencedLog

PATIENCE_S = 30.0


@pytest.fixture(params=["memory", "redis"])
def make_bench(request: pytest.FixtureRequest) -> Callable[..., Bench]:
    if request.param == "memory":
        return MemoryBench
    url: str = request.getfixturevalue("redis_url")
    return lambda **limits: RedisBench(url, **limits)


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
