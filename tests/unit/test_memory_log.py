"""The memory log in virtual time: minutes of waiting pass at once, and nothing polls."""

from __future__ import annotations

import anyio
import pytest
from waiting import VIRTUAL_TIME

from holdfast.log.memory import MemoryLog
from holdfast.log.protocol import Entry

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME], ids=["virtual"])]


def entry(name: str) -> Entry:
    return Entry(id=name, type="test", data=b"")


async def test_a_lease_lasts_exactly_its_time() -> None:
    log = MemoryLog()
    assert await log.acquire("leader", "a", 3.0) is not None
    await anyio.sleep(2.999)
    assert await log.acquire("leader", "b", 3.0) is None
    await anyio.sleep(0.001)
    lease = await log.acquire("leader", "b", 3.0)
    assert lease is not None
    assert lease.epoch == 2


async def test_an_abandoned_entry_is_taken_over_soon_after_its_time() -> None:
    log = MemoryLog(reclaim_after_s=5.0, block_s=0.5)
    await log.append("s", entry("x"))
    await anext(log.subscribe("s", group="g", consumer="dead"))
    began = anyio.current_time()
    async for batch in log.subscribe("s", group="g", consumer="heir"):
        if batch:
            break
    assert 5.0 <= anyio.current_time() - began <= 6.0


async def test_an_empty_batch_comes_when_the_block_is_over() -> None:
    log = MemoryLog(block_s=0.5)
    began = anyio.current_time()
    assert await anext(log.subscribe("s", group="g", consumer="c")) == []
    assert anyio.current_time() - began == pytest.approx(0.5)


async def test_waiting_entries_cost_no_time_at_all() -> None:
    log = MemoryLog(block_s=60.0)
    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(log.append, "s", entry("x"))
        batches = log.subscribe("s", group="g", consumer="c")
        while not await anext(batches):
            assert anyio.current_time() == began
    assert anyio.current_time() == began


async def test_a_stream_keeps_its_newest_entries() -> None:
    log = MemoryLog(stream_length_max=3)
    await log.append("s", *(entry(str(number)) for number in range(10)))
    assert [delivery.entry.id for delivery in await log.read("s")] == ["7", "8", "9"]
