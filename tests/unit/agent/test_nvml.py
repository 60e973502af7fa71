"""NVML from a recorded file, through the real reader process: every error code, calls that hang, garbage between the lines."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest
from waiting import wait_until_async

from holdfast.agent.collectors.nvml import NvmlCollector, build
from holdfast.agent.collectors.nvml_calls import DRIVER_GONE_CODES, FAST, SLOW, UNSUPPORTED_CODES, NvmlRefused, Replay
from holdfast.agent.collectors.nvml_reader import Gpu, Reading
from holdfast.agent.collectors.protocol import Surroundings
from holdfast.domain.signals import CollectorSilent, GpuHealth, GpuSample, KernelLine, NodeSignal, Tick
from holdfast.wire.telemetry import encode_tick

RECORDED = Path(__file__).parents[2] / "data/nvml/two_gpus.jsonl"
ERROR_CODES = (*range(1, 31), 999)


async def collect(collector: NvmlCollector, enough: Callable[[list[NodeSignal]], bool]) -> list[NodeSignal]:
    seen = list[NodeSignal]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collector.run, seen.append)
        await wait_until_async(lambda: enough(seen), description="the signals that were waited for")
        tasks.cancel_scope.cancel()
    return seen


def of(kind: type, seen: list[NodeSignal]) -> list[NodeSignal]:
    return [signal for signal in seen if isinstance(signal, kind)]


@pytest.mark.anyio
async def test_a_recorded_node_is_read_as_it_was() -> None:
    collector = NvmlCollector("n", expected=4, replay=RECORDED, interval_s=0.02, call_deadline_s=5.0)
    seen = await collect(collector, lambda s: len(of(GpuSample, s)) >= 3 and bool(of(KernelLine, s)))
    first, second = of(GpuSample, seen)[:2]
    assert isinstance(first, GpuSample)
    assert isinstance(second, GpuSample)
    assert (first.uuid, first.temperature_c) == (("GPU-aaaa", "GPU-bbbb"), (41.0, 61.0))
    assert (first.recovery_action, second.recovery_action) == ((0, 0), (0, 1))
    assert second.ecc_uncorrected == (0, 2)
    health = of(GpuHealth, seen)[0]
    assert isinstance(health, GpuHealth)
    assert (health.expected, health.remap_pending, health.remapped_rows) == (4, (0, 1), (0, 2))
    assert (health.nvlinks_up, health.nvlinks_down, health.pcie_width) == ((18, 17), (0, 1), (16, 8))
    assert (health.pcie_replays, health.rejected) == ((0, -1), (0, 1))
    assert health.margin_c == (30.0, math.inf)
    (xid,) = of(KernelLine, seen)
    assert isinstance(xid, KernelLine)
    assert (xid.xid, xid.gpu, xid.pci) == (48, 1, "00000000:3B:00.0")
    assert collector.rejections["margin_c 10"] >= 1
    encode_tick(Tick("n", "i", 1, 1.0, tuple(seen)))


class Refusing:
    """Answers one call with an error code and all others well."""

    def __init__(self, call: str, code: int) -> None:
        self._call, self._code = call, code

    def ask(self, call: str, gpu: int) -> object:
        if call == self._call:
            raise NvmlRefused(call, self._code)
        return {"uuid": "GPU-a", "remapped": [0, 0, 0, 0], "nvlinks": [18, 0], "fabric": [3, 0]}.get(call, 0)

    def events(self) -> list[dict[str, object]]:
        raise NvmlRefused("events", 3)


@pytest.mark.parametrize("code", ERROR_CODES)
def test_every_error_code_of_every_call_is_an_answer(code: int) -> None:
    for call in ("uuid", *FAST, *SLOW):
        gpu = Gpu(0, Refusing(call, code))
        readings = list[Reading]()
        for _ in range(2):
            gpu.request(slow=True)
            reading = gpu.take(time.monotonic() + 30.0)
            assert reading is not None
            readings.append(reading)
        last = readings[-1]
        if code in DRIVER_GONE_CODES:
            assert last.driver_gone == code
        elif code in (15, 28):
            assert last.lost
        elif code == 16:
            assert last.values["recovery_action"] == 1
            assert not last.lost
        elif code == 999:
            assert [reading.lost for reading in readings] == [False, True]
        else:
            assert not last.lost
            assert last.refused == ([] if code in UNSUPPORTED_CODES else [(call, code)])


@pytest.mark.anyio
async def test_a_gpu_that_hangs_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    replay = tmp_path / "hang.jsonl"
    rows = [
        {"call": "count", "answers": [2]},
        *({"call": "uuid", "gpu": gpu, "answers": [f"GPU-{gpu}"]} for gpu in (0, 1)),
        {"call": "power_w", "gpu": 0, "answers": [100.0]},
        {"call": "power_w", "gpu": 1, "answers": [{"hang_s": 600}]},
    ]
    replay.write_text("".join(json.dumps(row) + "\n" for row in rows))
    collector = NvmlCollector("n", replay=replay, interval_s=0.02, call_deadline_s=0.5)
    seen = await collect(collector, lambda s: len(of(CollectorSilent, s)) >= 2 and len(of(GpuSample, s)) >= 2)
    silent = of(CollectorSilent, seen)
    assert isinstance(silent[0], CollectorSilent)
    assert "GPU 1 in power_w" in silent[0].reason
    assert [s.misses for s in silent[:2] if isinstance(s, CollectorSilent)] == [1, 2]
    assert all(isinstance(s, GpuSample) and s.gpu == (0,) for s in of(GpuSample, seen))
    health = of(GpuHealth, seen)[0]
    assert isinstance(health, GpuHealth)
    assert health.gpu == (0, 1), "it is there, only nothing is known of it"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"call": "count", "answers": [{"error": 9}]}', "count failed with NVML error 9"),
        ('{"call": "count", "answers": [0]}', "has no GPU"),
        ("not json", r":1: not a recorded call"),
        (
            '{"call": "count", "answers": [1]}\n{"call": "uuid", "gpu": 0, "answers": [{"error": 18}]}',
            "available .error 18",
        ),
    ],
)
async def test_a_driver_that_is_not_there_says_why(tmp_path: Path, text: str, words: str) -> None:
    replay = tmp_path / "r.jsonl"
    replay.write_text(text)
    with pytest.raises(OSError, match=f"ended with code 3: .*{words}"):
        await NvmlCollector("n", replay=replay, interval_s=0.02).run(lambda _: None)


GOOD = {"at": 1.0, "gpus": [{"gpu": 0, "uuid": "a"}], "health": [{"gpu": 0, "uuid": "a"}], "late": [], "refused": []}


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"warning: something",
        b"{}",
        b"[1]",
        b"null",
        b"[" * 100_000,
        json.dumps({**GOOD, "at": float("nan")}).encode(),
        json.dumps({**GOOD, "gpus": [{}] * 300}).encode(),
        json.dumps({**GOOD, "gpus": [{"gpu": -1}]}).encode(),
        json.dumps({**GOOD, "gpus": [{"gpu": 0, "memory_used": 1 << 70}]}).encode(),
        json.dumps({**GOOD, "health": [{"gpu": 0, "remapped": [1]}]}).encode(),
        json.dumps({**GOOD, "late": [{}]}).encode(),
        json.dumps({"at": 1.0, "event": {"type": 8}}).encode(),
        json.dumps({"at": 1.0, "event": {"type": 8, "data": -1, "gpu": 0, "pci": ""}}).encode(),
        "{'ü'".encode("latin-1"),
    ],
)
def test_garbage_is_counted_and_passed_over(line: bytes) -> None:
    collector = NvmlCollector("n")
    assert collector.take(line) == []
    assert collector.rejections["garbage"] == 1
    assert len(collector.take(json.dumps(GOOD).encode())) == 2


def test_half_a_character_does_not_stop_a_tick() -> None:
    line = json.dumps({**GOOD, "gpus": [{"gpu": 0, "uuid": "\ud800"}]}).encode()
    signals = NvmlCollector("n").take(line)
    assert len(signals) == 2
    encode_tick(Tick("n", "i", 1, 1.0, tuple(signals)))


def test_what_the_driver_does_not_say_is_unknown_and_never_zero() -> None:
    _, health = NvmlCollector("n").take(json.dumps(GOOD).encode())
    assert isinstance(health, GpuHealth)
    assert health.remap_failed == health.pcie_width == health.nvlinks_up == (-1,)


def test_a_replay_answers_in_turn_and_then_the_same(tmp_path: Path) -> None:
    replay = tmp_path / "r.jsonl"
    replay.write_text('{"call": "power_w", "gpu": 0, "answers": [1.0, {"error": 15}]}\n')
    answers = Replay(replay)
    assert answers.ask("power_w", 0) == 1.0
    for _ in range(2):
        with pytest.raises(NvmlRefused, match="error 15"):
            answers.ask("power_w", 0)
    with pytest.raises(NvmlRefused, match="error 3"):
        answers.ask("power_w", 1)


def test_a_recording_stands_in_for_a_driver(tmp_path: Path) -> None:
    around = Surroundings("n", tmp_path, tmp_path, tmp_path, tmp_path / "k", nvml_replay=RECORDED)
    assert build(around) is not None
