"""More ticks than can be folded: the oldest telemetry goes and is counted, everything else stays, in order, and goes first."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import pytest
from diagnosing import T0, Fleet
from waiting import VIRTUAL_TIME

from holdfast.diagnostics.backlog import KEPT_MAX, WAITING_MAX, Backlog, Line
from holdfast.domain.signals import HostSample, NodeSignal, Tick
from holdfast.v1 import telemetry_pb2 as pb
from holdfast.wire.telemetry import encode_tick

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME], ids=["virtual"])]

FLEET = Fleet(nodes=3)


def telemetry(seq: int, node: str = "n0") -> pb.Tick:
    signal: NodeSignal = HostSample(node, T0, 0.0, 1, 0, 1)
    return encode_tick(Tick(node, "a", seq, T0, (signal,)))


def reliable(seq: int) -> pb.Tick:
    return encode_tick(Tick("n0", "a", seq, T0, (FLEET.exit_of(0, signal=9),)))


class Stream:
    """A line whose folds are seen, and wait for `gate`."""

    def __init__(self, seen: list[str], name: str, gate: anyio.Event | None = None) -> None:
        self.errors: list[Exception] = []
        self._seen, self._name, self._gate = seen, name, gate
        self.line = Line(self._fold, self.errors.append, lambda: seen.append(f"{name} ended"))
        self.raises: Callable[[], Exception] | None = None

    async def _fold(self, message: pb.Tick) -> None:
        if self.raises is not None:
            raise self.raises()
        if self._gate is not None:
            await self._gate.wait()
        self._seen.append(f"{self._name}{message.seq}")


@asynccontextmanager
async def folding(backlog: Backlog) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(backlog.fold)
        yield
        tasks.cancel_scope.cancel()


async def test_the_oldest_telemetry_is_dropped_and_what_is_reliable_stays_in_its_place() -> None:
    seen, backlog = list[str](), Backlog()
    a = Stream(seen, "a").line
    for seq in range(1, WAITING_MAX + 1):
        await backlog.put(a, reliable(seq) if seq == 2 else telemetry(seq))
    for seq in range(WAITING_MAX + 1, WAITING_MAX + 3):
        await backlog.put(a, telemetry(seq))
    assert backlog.dropped == 2
    async with folding(backlog):
        await anyio.sleep(1.0)
    assert seen == ["a2", "a4", "a5", "a6"]


async def test_streams_with_something_reliable_are_folded_first() -> None:
    seen, backlog = list[str](), Backlog()
    streams = {name: Stream(seen, name).line for name in "abc"}
    for name, line in streams.items():
        await backlog.put(line, telemetry(1))
        if name == "c":
            await backlog.put(line, reliable(2))
    async with folding(backlog):
        await anyio.sleep(1.0)
    assert seen == ["c1", "c2", "a1", "b1"]


async def test_a_stream_with_too_much_that_must_be_kept_waits_and_loses_nothing() -> None:
    seen, backlog, gate = list[str](), Backlog(), anyio.Event()
    a = Stream(seen, "a", gate).line
    for seq in range(KEPT_MAX):
        await backlog.put(a, reliable(seq))
    with anyio.move_on_after(60.0) as scope:
        await backlog.put(a, reliable(KEPT_MAX))
    assert scope.cancelled_caught
    async with folding(backlog):
        gate.set()
        await backlog.put(a, reliable(KEPT_MAX))
        await anyio.sleep(1.0)
    assert seen == [f"a{seq}" for seq in range(KEPT_MAX + 1)]
    assert backlog.dropped == 0


async def test_the_end_of_a_stream_comes_after_its_last_tick_and_once() -> None:
    seen, backlog = list[str](), Backlog()
    a = Stream(seen, "a").line
    await backlog.put(a, telemetry(1))
    backlog.close(a)
    backlog.close(a)
    async with folding(backlog):
        await anyio.sleep(1.0)
        backlog.close(a)
        await anyio.sleep(1.0)
    assert seen == ["a1", "a ended"]


@pytest.mark.parametrize("error", [ValueError("a bug"), RuntimeError("another")], ids=["value", "runtime"])
async def test_what_cannot_be_folded_is_its_own_streams_business(error: Exception) -> None:
    seen, backlog = list[str](), Backlog()
    bad, good = Stream(seen, "bad"), Stream(seen, "good")
    bad.raises = lambda: error
    async with folding(backlog):
        for seq in (1, 2):
            await backlog.put(bad.line, telemetry(seq))
            await backlog.put(good.line, telemetry(seq))
        await anyio.sleep(1.0)
        await backlog.put(bad.line, telemetry(3))
        backlog.close(bad.line)
        await anyio.sleep(1.0)
    assert bad.errors == [error]
    assert seen == ["good1", "good2", "bad ended"]
