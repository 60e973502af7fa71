"""Injected faults in the agent: only where the job allows them, and each ends by itself."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
from waiting import VIRTUAL_TIME

from holdfast.agent.collectors.kernel_lines import parse_record, recognise
from holdfast.agent.injection.faults import LASTING_MAX, Faults
from holdfast.agent.workers.pool import WorkerPool
from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.domain.faults import DIE_AFTER_S, FaultKind
from holdfast.domain.orders import Inject

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME], ids=["virtual"])]

NOW = 1000.0
ORDER = Inject("gpt", 3, "crash", 1, 10.0, 0, NOW + 5, "op-1")


@dataclass
class FakeWorker:
    pid: int = 77
    gone: anyio.Event = field(default_factory=anyio.Event)
    signals: list[tuple[float, signal.Signals]] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return not self.gone.is_set()

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self.alive:
            self.signals.append((anyio.current_time(), number))

    @property
    def stopped(self) -> bool:
        return bool(self.signals) and self.signals[-1][1] == signal.SIGSTOP


class FakePool:
    def __init__(self, worker: FakeWorker, *, chaos: bool) -> None:
        order = SimpleNamespace(chaos=chaos)
        self.generations: dict[tuple[str, int], Any] = {
            ("gpt", 3): SimpleNamespace(order=order, workers={1: worker}),
        }

    def running_generation(self, job: str, number: int) -> Any:
        return self.generations.get((job, number))


@dataclass
class Played:
    faults: Faults
    worker: FakeWorker
    kernel_log: Path
    died_at: list[float]


@asynccontextmanager
async def agent(directory: Path, *, chaos: bool = True) -> AsyncIterator[Played]:
    worker, died_at = FakeWorker(), list[float]()
    pool = cast(WorkerPool, FakePool(worker, chaos=chaos))
    log = directory / "kernel.log"
    faults = Faults(
        pool,
        log,
        disk_dir=directory / "disk",
        memory_dir=directory / "memory",
        agent_dir=directory,
        die=lambda: died_at.append(anyio.current_time()),
        clock=lambda: NOW,
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(faults.run)
        await anyio.lowlevel.checkpoint()
        yield Played(faults, worker, log, died_at)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("kind", list(FaultKind))
async def test_a_job_that_does_not_allow_faults_gets_none(tmp_path: Path, kind: str) -> None:
    async with agent(tmp_path, chaos=False) as played:
        with pytest.raises(Conflict, match=r"gpt does not allow injected faults; .* has `chaos: true` in its file"):
            await played.faults.inject(replace(ORDER, kind=kind, xid=79, loss_percent=5.0, offset_s=60.0))
        await anyio.sleep(60)
        assert (played.worker.signals, played.died_at, played.kernel_log.exists()) == ([], [], False)


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"generation": 2}, Conflict, "generation 2 of gpt does not run here"),
        ({"job": "other"}, Conflict, "generation 3 of other does not run here"),
        ({"rank": 0}, Conflict, "rank 0 of gpt does not run here"),
        ({"not_after": NOW - 1}, Conflict, "the order is too old"),
        ({"not_after": float("nan")}, InvalidSpec, "not_after: nan"),
        (
            {"kind": "flood"},
            InvalidSpec,
            "kind: 'flood' is not valid; expected crash, hang, .* bit_flip, lossy_link, clock_jump$",
        ),
        ({"kind": "hang", "for_s": 0.0}, InvalidSpec, "for_s: 0"),
        ({"kind": "hang", "for_s": 1e9}, InvalidSpec, "at most 3600 s"),
        ({"kind": "xid", "xid": 0}, InvalidSpec, "xid: 0 is not valid; expected 1 to 999"),
        (
            {"kind": "lossy_link", "loss_percent": 0.0},
            InvalidSpec,
            "loss_percent: 0.0 is not valid; expected 0.1 to 95",
        ),
        ({"kind": "lossy_link", "loss_percent": float("nan")}, InvalidSpec, "loss_percent: nan"),
        ({"kind": "clock_jump", "offset_s": 0.0}, InvalidSpec, "offset_s: 0.0 .* -86400 to 86400, not 0"),
        ({"kind": "clock_jump", "offset_s": float("nan")}, InvalidSpec, "offset_s: nan"),
        ({"kind": "clock_jump", "offset_s": 1e6}, InvalidSpec, "offset_s: 1000000.0"),
        ({"kind": "leader_kill"}, Conflict, "leader_kill is a fault of the control plane, which an agent cannot cause"),
        ({"kind": "redis_kill"}, Conflict, "redis_kill is a fault of the control plane, which an agent cannot cause"),
        (
            {"kind": "lossy_link", "loss_percent": 5.0},
            Conflict,
            "this agent does not allow lossy_link; set HOLDFAST_FAULT_LINK",
        ),
        (
            {"kind": "clock_jump", "offset_s": -60.0},
            Conflict,
            r"at most 0 s, and -60 s are requested \(HOLDFAST_FAULT_CLOCK_S_MAX",
        ),
    ],
)
async def test_what_makes_no_sense_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], why: str
) -> None:
    async with agent(tmp_path) as played:
        with pytest.raises(error, match=why):
            await played.faults.inject(replace(ORDER, **changes))
        await anyio.sleep(60)
        assert (played.worker.signals, played.died_at) == ([], [])


async def test_a_crash_is_sigkill(tmp_path: Path) -> None:
    async with agent(tmp_path) as played:
        assert await played.faults.inject(ORDER) == "SIGKILL to rank 1 of gpt (pid 77)"
        assert [number for _, number in played.worker.signals] == [signal.SIGKILL]


async def test_a_hang_ends_after_its_time(tmp_path: Path) -> None:
    async with agent(tmp_path) as played:
        await played.faults.inject(replace(ORDER, kind="hang", for_s=10.0))
        await anyio.sleep(9.9)
        assert played.worker.stopped
        await anyio.sleep(0.2)
        assert [number for _, number in played.worker.signals] == [signal.SIGSTOP, signal.SIGCONT]


async def test_a_slow_rank_is_stopped_half_of_the_time_and_ends_running(tmp_path: Path) -> None:
    async with agent(tmp_path) as played:
        await played.faults.inject(replace(ORDER, kind="slow", for_s=10.0))
        await anyio.sleep(30)
        signals = played.worker.signals
        assert not played.worker.stopped
        assert signals[-1][0] - signals[0][0] <= 10.0
        pairs = list(zip(signals[::2], signals[1::2], strict=False))
        assert len(pairs) >= 45
        assert {(before[1], after[1]) for before, after in pairs} == {(signal.SIGSTOP, signal.SIGCONT)}
        stopped_s = sum(after[0] - before[0] for before, after in pairs)
        assert stopped_s == pytest.approx(5.0, abs=0.3)
        assert max(after[0] - before[0] for before, after in pairs) < 2, "or it would be found as a stopped process"


@pytest.mark.parametrize("kind", ["hang", "slow"])
async def test_what_lasts_ends_with_the_rank_and_with_the_agent(tmp_path: Path, kind: str) -> None:
    async with agent(tmp_path) as played:
        await played.faults.inject(replace(ORDER, kind=kind, for_s=1000.0))
        await anyio.sleep(1)
        played.worker.gone.set()
        count = len(played.worker.signals)
        await anyio.sleep(5)
        assert len(played.worker.signals) == count
    async with agent(tmp_path) as played:
        await played.faults.inject(replace(ORDER, kind=kind, for_s=1000.0))
        await anyio.sleep(1.05)
    assert played.worker.signals[-1][1] == signal.SIGCONT


async def test_a_lost_node_answers_before_it_ends(tmp_path: Path) -> None:
    async with agent(tmp_path) as played:
        began = anyio.current_time()
        assert "SIGKILL to the agent" in await played.faults.inject(replace(ORDER, kind="node_loss"))
        assert played.died_at == []
        await anyio.sleep(5)
        assert played.died_at == [pytest.approx(began + DIE_AFTER_S)]


async def test_an_xid_is_a_record_that_the_collector_reads(tmp_path: Path) -> None:
    async with agent(tmp_path) as played:
        await played.faults.inject(replace(ORDER, kind="xid", xid=94))
        record = parse_record(played.kernel_log.read_text().rstrip("\n"))
        found = recognise(record.text)
        assert found is not None
        assert found.xid == 94


async def test_a_kernel_log_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    async with agent(tmp_path) as played:
        played.kernel_log.mkdir()
        with pytest.raises(Conflict, match=r"kernel\.log cannot be written: Is a directory"):
            await played.faults.inject(replace(ORDER, kind="xid", xid=94))


async def test_too_many_at_once_are_refused(tmp_path: Path) -> None:
    async with agent(tmp_path) as played:
        for _ in range(LASTING_MAX):
            await played.faults.inject(replace(ORDER, kind="slow"))
        with pytest.raises(Conflict, match="64 injected faults last already"):
            await played.faults.inject(replace(ORDER, kind="slow"))
        await anyio.sleep(11)
        await played.faults.inject(replace(ORDER, kind="slow"))
