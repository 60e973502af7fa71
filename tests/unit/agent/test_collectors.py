"""Collectors that hang, fail or babble cost a signal, never the agent."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog
from waiting import wait_until_async

from holdfast.agent.collectors.host import Host, blocked_tasks, clock_offset_s, sample, write_latency
from holdfast.agent.collectors.nvml import NvmlCollector
from holdfast.agent.collectors.protocol import Emit, Probe, Surroundings, keep_collecting
from holdfast.agent.collectors.registry import build_all
from holdfast.domain.signals import CollectorSilent, GpuSample, HostSample, NodeSignal

pytestmark = pytest.mark.anyio

GPU = {
    "gpu": 0, "uuid": "GPU-1", "temperature_c": 41.0, "power_w": 120.5, "memory_used": 1024, "ecc_uncorrected": 0,
    "recovery_action": -1, "lost": False,
}  # fmt: skip


async def test_a_probe_that_hangs_is_reported_each_interval_and_recovers() -> None:
    seen, gate = list[NodeSignal](), threading.Event()
    value = HostSample("n", 1.0, 0.0, 1, 0, 1)

    def ask() -> tuple[HostSample]:
        gate.wait()
        return (value,)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Probe("disk", "n", ask, interval_s=0.01, deadline_s=0.01).run, seen.append)
        await wait_until_async(lambda: len(seen) >= 3, description="three misses")
        assert [s.misses for s in seen[:3] if isinstance(s, CollectorSilent)] == [1, 2, 3]
        gate.set()
        await wait_until_async(lambda: value in seen, description="its answer after all")
        tasks.cancel_scope.cancel()


async def test_a_failing_collector_is_reported_and_kept_running() -> None:
    seen, runs = list[NodeSignal](), 0

    class Broken:
        name = "broken"

        async def run(self, emit: Emit) -> None:
            nonlocal runs
            runs += 1
            raise PermissionError("/dev/kmsg is not ours")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_collecting, Broken(), "n", seen.append)
        await wait_until_async(lambda: runs == 2, description="a second try")
        tasks.cancel_scope.cancel()
    assert isinstance(seen[0], CollectorSilent)
    assert seen[0].collector == "broken"
    assert "not ours" in seen[0].reason


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: dict[str, str]()["gone"], "KeyError: 'gone'"),
        (lambda: sys.exit("a library left"), "SystemExit: a library left"),
    ],
    ids=["bug", "exit"],
)
async def test_a_collector_with_a_bug_is_a_named_signal_and_explained_once(
    ask: Callable[[], Sequence[NodeSignal]], words: str
) -> None:
    seen = list[CollectorSilent]()
    other = list[NodeSignal]()

    def emit(signal: NodeSignal) -> None:
        assert isinstance(signal, CollectorSilent)
        seen.append(signal)

    with structlog.testing.capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(keep_collecting, Probe("odd", "n", ask, interval_s=0.01, deadline_s=5.0), "n", emit)
            value = HostSample("n", 1.0, 0.0, 1, 0, 1)
            good = Probe("good", "n", lambda: (value,), interval_s=0.01, deadline_s=5.0)
            tasks.start_soon(keep_collecting, good, "n", other.append)
            await wait_until_async(lambda: len(seen) >= 2, description="a second try")
            count = len(other)
            await wait_until_async(lambda: len(other) > count, description="the others to go on")
            tasks.cancel_scope.cancel()
    assert [(signal.collector, signal.misses) for signal in seen[:2]] == [("odd", 1), ("odd", 2)]
    assert words in seen[0].reason
    assert len([entry for entry in logs if "exc_info" in entry]) == 1
    assert len([entry for entry in logs if entry["event"] == "collector failed"]) == len(seen)


async def test_a_collector_that_ends_is_reported_too() -> None:
    seen = list[NodeSignal]()

    class Ending:
        name = "ending"

        async def run(self, emit: Emit) -> None:
            return

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep_collecting, Ending(), "n", seen.append)
        await wait_until_async(lambda: bool(seen), description="its end to be said")
        tasks.cancel_scope.cancel()
    assert isinstance(seen[0], CollectorSilent)
    assert "ended by itself" in seen[0].reason


def test_the_host_is_sampled(tmp_path: Path) -> None:
    found = sample("n", (tmp_path,))
    assert 0 < found.memory_used <= found.memory_total
    assert found.disks[0][0] == str(tmp_path)
    with pytest.raises(OSError, match="none"):
        sample("n", (tmp_path / "none",))


def test_slow_metrics_are_sampled_every_sixth_interval(tmp_path: Path) -> None:
    host = Host("n", (tmp_path,))
    found = [host.ask()[0] for _ in range(7)]
    assert [bool(item.disk_latency) for item in found] == [True] + [False] * 5 + [True]
    assert found[0].blocked is not None
    assert list(tmp_path.iterdir()) == [], "nothing is left in the directories that others read"
    assert clock_offset_s() is None or abs(clock_offset_s() or 0.0) < 1e6


def test_a_directory_that_cannot_be_written_to_is_infinitely_slow(tmp_path: Path) -> None:
    assert write_latency(tmp_path / "none") == math.inf
    assert write_latency(Path("/proc")) in (None, math.inf)
    assert 0.0 <= (write_latency(tmp_path) or 0.0) < 30.0


def test_blocked_tasks_are_counted_whatever_their_name(tmp_path: Path) -> None:
    for pid, stat in (
        ("1", "1 (a) S 0"),
        ("2", "2 (b) D) D 0"),
        ("3", "3 (D) R 0"),
        ("4", "garbage"),
        ("x", "5 (a) D 0"),
    ):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "stat").write_text(stat)
    (tmp_path / "6").mkdir()  # it has ended meanwhile
    assert blocked_tasks(tmp_path) == 1


def test_a_node_without_a_driver_has_no_gpu_collector(tmp_path: Path) -> None:
    names = {collector.name for collector in build_all(Surroundings("n", tmp_path, tmp_path, tmp_path, tmp_path / "k"))}
    assert {"host", "kernel-log"} <= names
    assert ("nvml" in names) == Path("/proc/driver/nvidia/version").exists()


class ScriptedReader(NvmlCollector):
    """Runs a few lines of Python instead of the real reader. Its deadline is short once it has said something: how long an
    interpreter takes to start says nothing about it."""

    def __init__(self, text: str) -> None:
        super().__init__("n", interval_s=0.01, deadline_s=30.0)
        self._text = text

    def command(self) -> list[str]:
        return [sys.executable, "-S", "-c", self._text]

    def signals(self, record: Mapping[str, Any]) -> list[NodeSignal]:
        self._deadline_s = 0.3
        return super().signals(record)


async def test_samples_arrive_and_a_wedged_reader_is_replaced() -> None:
    seen = list[NodeSignal]()
    line = json.dumps({"at": 5.0, "gpus": [GPU], "health": [], "late": [], "refused": []})
    reader = ScriptedReader(f"import time\nprint('noise')\nprint({line!r}, flush=True)\ntime.sleep(600)")
    with pytest.raises(OSError, match="is replaced"):
        await reader.run(seen.append)
    assert [type(signal) for signal in seen] == [GpuSample, *[CollectorSilent] * 4]


async def test_a_reader_that_ends_says_why() -> None:
    with pytest.raises(OSError, match=r"code 3: NVML: Driver Not Loaded"):
        await ScriptedReader("import sys; sys.stderr.write('NVML: Driver Not Loaded'); sys.exit(3)").run(lambda _: None)


async def test_readers_import_little() -> None:
    """They stay on every node with GPUs."""
    code = (
        "import sys, holdfast.agent.collectors.nvml_reader, holdfast.agent.collectors.nvrx_reader\n"
        "print(*{'asyncio', 'anyio', 'google', 'grpc', 'psutil', 'rich', 'structlog'} & set(sys.modules))"
    )
    done = await anyio.run_process([sys.executable, "-c", code])
    assert done.stdout.split() == []
