"""Measures the event log: append rate, drain rate of a group, duration of a leader's commit, delay from append to delivery.

    python benchmarks/event_log.py [--entries 10000] [--redis-url redis://…]

Runs on an embedded Redis unless a URL is given (it then uses a separate fleet name and deletes its data). Prints minimum,
median and maximum of five runs each. Messages have 200 bytes, batches 256 messages.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import anyio
import anyio.lowlevel
import redis

from holdfast.log.embedded import EmbeddedRedis
from holdfast.log.memory import MemoryLog
from holdfast.log.protocol import Commit, Entry, FencedLog, Lease
from holdfast.log.redis import RedisLog

RUNS = 5
BATCH = 256
PAYLOAD = b"x" * 200
ROUND_TRIPS = 200
PAUSE_S = 0.002  # between deliveries, so that the consumer waits again
FLEET = f"benchmark-{os.getpid()}"

Measure = Callable[[FencedLog, str, int], Awaitable[float]]


def entries(begin: int, end: int) -> list[Entry]:
    return [Entry(id=f"message-{number}", type="Benchmark", data=PAYLOAD) for number in range(begin, end)]


async def append_rate(log: FencedLog, stream: str, count: int) -> float:
    """Entries per second, appended in batches."""
    batches = [entries(begin, min(begin + BATCH, count)) for begin in range(0, count, BATCH)]
    started = time.perf_counter()
    for batch in batches:
        await log.append(stream, *batch)
    return count / (time.perf_counter() - started)


async def drain_rate(log: FencedLog, stream: str, count: int) -> float:
    """Entries per second, read by a group and acknowledged batch by batch."""
    await append_rate(log, stream, count)
    done, started = 0, time.perf_counter()
    async for batch in log.subscribe(stream, group="g", consumer="c", batch_max=BATCH):
        await log.acknowledge(stream, "g", *(delivery.position for delivery in batch))
        done += len(batch)
        if done == count:
            break
    return count / (time.perf_counter() - started)


async def commit_ms(log: FencedLog, stream: str, count: int) -> float:
    """Median milliseconds of a commit of a 100 kB snapshot, one entry out and one acknowledged."""
    lease = await leader(log)
    [position] = await log.append(stream, *entries(0, 1))
    times = []
    for entry in entries(0, ROUND_TRIPS):
        started = time.perf_counter()
        await log.commit(
            lease,
            Commit(
                snapshot={"s": b"s" * 100_000},
                append=[(stream + "-out", entry)],
                acknowledge={(stream, "g"): [position]},
            ),
        )
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


async def delivery_ms(log: FencedLog, stream: str, count: int) -> float:
    """Median milliseconds from before the append to a waiting consumer's wake-up."""
    times: list[float] = []
    sent_at, arrived = 0.0, anyio.Event()
    async with anyio.create_task_group() as tasks:

        async def consume() -> None:
            async for batch in log.subscribe(stream, group="g", consumer="c"):
                for delivery in batch:
                    times.append(1e3 * (time.perf_counter() - sent_at))
                    await log.acknowledge(stream, "g", delivery.position)
                    arrived.set()

        tasks.start_soon(consume)
        for entry in entries(0, ROUND_TRIPS):
            await anyio.sleep(PAUSE_S)
            sent_at, arrived = time.perf_counter(), anyio.Event()
            await log.append(stream, entry)
            await arrived.wait()
        tasks.cancel_scope.cancel()
    return statistics.median(times)


async def leader(log: FencedLog) -> Lease:
    lease = await log.acquire("benchmark", "benchmark", 600.0)
    if lease is None:
        raise SystemExit(f"another benchmark holds the lease of fleet {FLEET}")
    return lease


MEASURES: tuple[tuple[str, str, Measure], ...] = (
    ("append", "entries/s", append_rate),
    ("drain and acknowledge", "entries/s", drain_rate),
    ("fenced commit", "ms", commit_ms),
    ("append to delivery", "ms", delivery_ms),
)


async def measure(name: str, log: FencedLog, count: int) -> None:
    await log.ping()
    for title, unit, run in MEASURES:
        values = sorted([await run(log, f"{run.__name__}-{number}", count) for number in range(RUNS)])
        low, middle, high = (f"{value:>10,.2f}" for value in (values[0], statistics.median(values), values[-1]))
        print(f"{name:8} {title:24} min {low}  median {middle}  max {high}  {unit}")


async def main(url: str, count: int) -> None:
    await measure("memory", MemoryLog(), count)
    log = RedisLog(url, FLEET)
    try:
        await measure("redis", log, count)
    finally:
        await log.aclose()
        with redis.Redis.from_url(url) as client:
            for key in client.scan_iter(match=f"holdfast:{{{FLEET}}}:*"):
                client.delete(key)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=10_000, help="entries per run of the rates")
    parser.add_argument("--redis-url", default="", help="default: an embedded Redis")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        chosen = arguments.redis_url or stack.enter_context(EmbeddedRedis()).url
        anyio.run(main, chosen, arguments.entries)
