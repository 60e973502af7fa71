"""Processes killed with SIGKILL amid their work with the log: nothing is lost, nothing is half done."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest
from eventlogs import Reader, entries, names, redis_log
from waiting import wait_until_async

from holdfast.log.protocol import Lease
from holdfast.log.redis import RedisLog

pytestmark = pytest.mark.anyio

CRASHES = 8
OUTPUTS_MAX = 10_000

CONSUMER = """
import sys, anyio
from eventlogs import GROUP, redis_log

async def main():
    log = redis_log(sys.argv[1])
    done = 0
    async for batch in log.subscribe("s", group=GROUP, consumer="victim", batch_max=10):
        for delivery in batch:
            if done == int(sys.argv[2]):
                print("amid a batch", flush=True)
                await anyio.sleep_forever()
            await log.acknowledge("s", GROUP, delivery.position)
            done += 1

anyio.run(main)
"""

# Folds each entry into a counter, and commits the counter, one output and the acknowledgement together: a supervisor in small.
LEADER = """
import sys, anyio
from eventlogs import GROUP, entry, redis_log
from holdfast.log.protocol import Commit

async def main():
    log = redis_log(sys.argv[1])
    lease = None
    while lease is None:
        lease = await log.acquire("leader", sys.argv[2], 30.0)
    print("leading", flush=True)
    state = int((await log.snapshot("leader")).get("count", b"0"))
    async for batch in log.subscribe("s", group=GROUP, consumer="leader", batch_max=1):
        for delivery in batch:
            state += 1
            await log.commit(lease, Commit(
                snapshot={"count": str(state).encode()},
                append=[("out", entry(delivery.entry.id))],
                acknowledge={("s", GROUP): [delivery.position]},
            ))

anyio.run(main)
"""


@pytest.fixture
async def log(redis_url: str) -> AsyncIterator[RedisLog]:
    log = redis_log(redis_url)
    yield log
    await log.aclose()


@contextmanager
def running(program: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that can import the tests' helpers; killed at the end, if it has not been before."""
    path = [entry for entry in sys.path if entry.endswith("tests")]
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{program}", *args],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def test_a_consumer_killed_amid_a_batch(log: RedisLog, redis_url: str) -> None:
    await log.append("s", *entries(30))
    with running(CONSUMER, redis_url, "13") as victim:
        assert first_line(victim) == "amid a batch"
    heir = Reader(log, "s", consumer="heir")
    taken = await heir.take_and_acknowledge(17)
    assert sorted(names(taken)) == sorted(f"e{number}" for number in range(13, 30)), "13 were done, and done once"
    assert {delivery.entry.id for delivery in taken if delivery.deliveries == 2} == {f"e{n}" for n in range(13, 20)}
    await heir.idle()


async def test_a_leader_killed_again_and_again_does_each_thing_once(log: RedisLog, redis_url: str) -> None:
    """Wherever the kill falls, state, output and acknowledgement agree: all of a commit or nothing of it."""
    rng = random.Random(20251121)
    total = 0
    for life in range(CRASHES):
        await log.append("s", *entries(200, prefix=f"life{life}-"))
        total += 200
        with running(LEADER, redis_url, "same-name") as leader:
            assert first_line(leader) == "leading"
            await until_done(log, await done(log) + rng.randrange(1, 150))
        assert int((await log.snapshot("leader")).get("count", b"0")) == await done(log)
    with running(LEADER, redis_url, "same-name"):
        await until_done(log, total)
    outputs = names(await log.read("out", count=OUTPUTS_MAX))
    assert len(outputs) == len(set(outputs)) == total, "nothing lost, nothing twice"


async def done(log: RedisLog) -> int:
    return len(await log.read("out", count=OUTPUTS_MAX))


async def until_done(log: RedisLog, count: int) -> None:
    async def reached() -> bool:
        return await done(log) >= count

    await wait_until_async(reached, description=f"{count} outputs")


async def test_a_killed_leader_is_fenced_by_its_successor(log: RedisLog, redis_url: str) -> None:
    with running(LEADER, redis_url, "first") as leader:
        assert first_line(leader) == "leading"
        assert await log.acquire("leader", "second", 1.0) is None
    first = await log.acquire("leader", "first", 0.001)
    assert first is not None
    second: Lease = await wait_until_async(
        lambda: log.acquire("leader", "second", 30.0), description="the lease to expire"
    )
    assert second.epoch > first.epoch
    assert not await log.renew(first, 30.0)
