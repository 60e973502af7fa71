"""The intake and the publisher in virtual time: nothing folded twice, nothing acknowledged early, nothing lost."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio
import pytest
from diagnosing import CATALOGUE, T0, Fleet
from waiting import VIRTUAL_TIME, wait_until_async

from holdfast.diagnostics import detectors
from holdfast.diagnostics.engine import Engine
from holdfast.diagnostics.intake import Intake
from holdfast.diagnostics.publisher import Publisher
from holdfast.diagnostics.seq_window import SeqWindow
from holdfast.diagnostics.ticks import SETTLE_S, NodeStream, Replaced
from holdfast.domain.errors import MalformedMessage, Unavailable
from holdfast.domain.findings import Finding, FindingKind
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import GenerationStarted, NodeSignal, Tick
from holdfast.log.memory import MemoryLog
from holdfast.log.names import FINDINGS, STEPS
from holdfast.log.protocol import Entry
from holdfast.wire.events import decode_finding, decode_published_steps, decode_steps

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME], ids=["virtual"])]


class FlakyLog(MemoryLog):
    """Away while `down` is set; a try in doubt is written and fails all the same."""

    down = False
    doubt = False

    async def append(self, stream: str, *entries: Entry) -> list[str]:
        if self.down:
            raise Unavailable("the log is away")
        positions = await super().append(stream, *entries)
        if self.doubt:
            self.doubt = False
            raise Unavailable("the answer was lost")
        return positions


class Bench:
    def __init__(self, *, findings_max: int = 100) -> None:
        self.log = FlakyLog()
        self.publisher = Publisher(self.log, clock=self.clock, findings_max=findings_max)
        engine = Engine(detectors.standard(CATALOGUE))
        self.intake = Intake(engine, self.publisher, clock=self.clock)
        self.fleet = Fleet(nodes=3)

    @staticmethod
    def clock() -> float:
        return T0 + anyio.current_time()

    async def findings(self) -> list[Finding]:
        return [decode_finding(delivery.entry.data) for delivery in await self.log.read(FINDINGS)]


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(bench.publisher.publish_findings)
        tasks.start_soon(bench.publisher.publish_steps)
        tasks.start_soon(bench.intake.watch_clock)
        yield bench
        tasks.cancel_scope.cancel()


def tick(seq: int, *signals: NodeSignal, node: str = "n0", incarnation: str = "a") -> Tick:
    return Tick(node, incarnation, seq, T0, signals)


async def test_a_tick_sent_again_is_folded_once() -> None:
    async with running(Bench()) as bench:
        stream = NodeStream()
        exit_ = bench.fleet.exit_of(0, signal=9)
        for seq in (1, 1, 1):
            receipt = await bench.intake.tick(stream, tick(seq, exit_))
        assert receipt.must_hold
        assert receipt.settle_s == SETTLE_S
        assert bench.publisher.offered == 1


async def test_findings_survive_a_log_that_is_away_and_one_in_doubt() -> None:
    async with running(Bench()) as bench:
        bench.log.down = True
        await bench.intake.tick(NodeStream(), tick(1, bench.fleet.exit_of(0, signal=9)))
        with anyio.move_on_after(60.0) as scope:
            await bench.publisher.wait_published(1)
        assert scope.cancelled_caught  # held back for as long as the log is away
        bench.log.down, bench.log.doubt = False, True
        await bench.publisher.wait_published(1)
        ids = [finding.id for finding in await bench.findings() if finding.kind is FindingKind.WORKER_CRASH]
        assert len(ids) == 2  # written twice …
        assert len(set(ids)) == 1  # … and known by one id


@pytest.mark.parametrize("ahead_s", [{}, {"n0": 3600.0}, {"n0": -3600.0, "n1": 7200.0, "n2": -1e6}], ids=str)
async def test_the_times_of_steps_are_those_of_diagnostics_whatever_clocks_nodes_have(
    ahead_s: dict[str, float],
) -> None:
    """A step of several nodes has one time, and it is comparable with that of other steps and of events."""
    async with running(Bench()) as bench:
        fleet, streams, seqs = bench.fleet, {node: NodeStream() for node in bench.fleet.names}, itertools.count(1)

        async def send(node: str, signal: NodeSignal) -> None:
            by_node = bench.clock() + ahead_s.get(node, 0.0)
            await bench.intake.tick(streams[node], Tick(node, "a", next(seqs), by_node, (signal,)))

        for node in fleet.names:
            await send(node, fleet.started(node))
        ended_at = []
        for step in range(1, 4):
            await anyio.sleep(1.0)
            ended_at.append(bench.clock())
            for node in fleet.names:
                by_node = ended_at[-1] + ahead_s.get(node, 0.0)
                n = len(ranks := tuple(fleet.ranks_of(node)))
                columns = replace(fleet.columns(node, ranks), step=(step,) * n, ended_at=(by_node,) * n)
                await send(node, replace(columns, at=by_node, started_at=(by_node - 0.7,) * n))

        async def published() -> bool:
            return len(await bench.log.read(STEPS)) > 0 and not bench.publisher._steps

        await wait_until_async(published, description="the steps to be published")
        batches = [delivery.entry.data for delivery in await bench.log.read(STEPS)]
        records = [record for batch in batches for record in decode_steps(batch)]
        assert [record.step for record in records] == [1, 2, 3]
        assert [record.ended_at for record in records] == pytest.approx(ended_at, abs=0.01)
        assert [record.ended_at - record.started_at for record in records] == pytest.approx([0.7] * 3, abs=0.01)
        assert all(ended_at[0] < decode_published_steps(batch)[1] <= bench.clock() for batch in batches)


async def test_a_full_buffer_holds_back_ticks_and_the_clock_and_drops_nothing() -> None:
    async with running(Bench(findings_max=2)) as bench:
        bench.log.down = True
        stream = NodeStream()
        for rank in (0, 1):
            exit_ = bench.fleet.exit_of(rank, signal=9)
            await bench.intake.tick(stream, tick(rank, *[exit_], node="n0"))
            bench.fleet.generation += 1
        assert bench.publisher.offered == 2
        with anyio.move_on_after(600.0) as scope:
            await bench.intake.tick(stream, tick(7, bench.fleet.exit_of(2, signal=9)))
        assert scope.cancelled_caught
        bench.log.down = False
        await bench.intake.tick(stream, tick(7, bench.fleet.exit_of(2, signal=9)))
        await bench.publisher.wait_published(3)
        await anyio.sleep(2.0)
        first = [finding.kind for finding in await bench.findings() if not finding.repeat]
        assert first == [FindingKind.WORKER_CRASH] * 3


async def test_an_old_stream_is_refused_and_its_end_means_nothing() -> None:
    async with running(Bench()) as bench:
        old, new = NodeStream(), NodeStream()
        started = bench.fleet.started("n0")
        await bench.intake.tick(old, tick(1, started))
        await bench.intake.tick(new, tick(2))
        with pytest.raises(Replaced):
            await bench.intake.tick(old, tick(3))
        bench.intake.close(old, clean=False)
        for seq in range(4, 40):
            await bench.intake.tick(new, tick(seq))
            await anyio.sleep(0.1)
        assert await bench.findings() == []
        bench.intake.close(new, clean=False)
        await wait_until_async(bench.findings, description="the lost node")


@pytest.mark.parametrize(
    ("signal", "field"),
    [
        (GenerationStarted("n0", T0, "j", 1, Mesh.of({"dp": 2_000_000}), (0,), HangSpec()), "generation_started.mesh"),
        (GenerationStarted("n0", T0, "j", 1, Mesh.of({"dp": 1}), (0,), HangSpec(floor_s=0)), "generation_started.hang"),
        (
            GenerationStarted("n0", T0, "j", 1, Mesh.of({"dp": 1}), (0,), HangSpec(factor=float("nan"))),
            "generation_started.hang",
        ),
    ],
    ids=["mesh", "floor", "factor"],
)
async def test_numbers_that_cannot_be_worked_with_are_refused(signal: GenerationStarted, field: str) -> None:
    bench = Bench()
    with pytest.raises(MalformedMessage, match=field):
        await bench.intake.tick(NodeStream(), tick(1, signal))


async def test_one_stream_speaks_for_one_node() -> None:
    bench, stream = Bench(), NodeStream()
    await bench.intake.tick(stream, tick(1))
    with pytest.raises(MalformedMessage, match=r"tick\.node"):
        await bench.intake.tick(stream, tick(2, node="n1"))


async def test_the_window_knows_what_it_has_seen() -> None:
    chance = random.Random(7)
    window = SeqWindow()
    seen: set[int] = set()
    for _ in range(5000):
        seq = max(0, len(seen) + chance.randint(-200, 50))
        assert window.add(seq) is (seq not in seen)
        seen.add(seq)
    assert SeqWindow(newest=5000).add(1)  # older than the window: folded rather than lost
