"""What the agent shows of its GPUs, and what it does not make up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sinks import Kept, keep

from holdfast.agent.collectors.nvml import NvmlCollector
from holdfast.agent.gpus.gpu_meters import GpuMeters
from holdfast.domain.signals import GpuHealth, GpuSample


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    return keep(monkeypatch)


def sample() -> GpuSample:
    return GpuSample(
        "n1", 5.0, (0, 1), ("a", "b"), (61.0, 44.0), (650.0, 90.0), (7, 3), (0, 0), (-1, -1), (False, False)
    )


def health() -> GpuHealth:
    collector = NvmlCollector("n1")
    gpus = [{"gpu": 0, "uuid": "a", "utilization": 97}, {"gpu": 1, "uuid": "b"}]
    found = collector.signals({"at": 5.0, "refused": [], "late": [], "gpus": [], "health": gpus})
    [signal] = [each for each in found if isinstance(each, GpuHealth)]
    return signal


def test_the_newest_values_of_each_gpu(kept: Kept) -> None:
    meters = GpuMeters()
    meters.watch(sample())
    meters.watch(replace(sample(), temperature_c=(70.0, 45.0)))
    assert kept.shown["holdfast.gpu.temperature"] == {0: 70.0, 1: 45.0}
    assert kept.shown["holdfast.gpu.power"] == {0: 650.0, 1: 90.0}
    assert kept.shown["holdfast.gpu.memory"] == {0: 7, 1: 3}


def test_a_gpu_that_is_lost_has_no_series_any_more(kept: Kept) -> None:
    meters = GpuMeters()
    meters.watch(sample())
    meters.watch(replace(sample(), lost=(False, True), temperature_c=(61.0, 0.0)))
    assert kept.shown["holdfast.gpu.temperature"] == {0: 61.0}


def test_a_duty_cycle_that_the_driver_does_not_say_is_not_zero(kept: Kept) -> None:
    GpuMeters().watch(health())
    assert kept.shown["holdfast.gpu.utilization"] == {0: 97}


def test_nothing_is_done_while_telemetry_is_off() -> None:
    GpuMeters().watch(sample())
