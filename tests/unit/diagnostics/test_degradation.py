"""Degradation: trends are reported with their numbers; bursts, resets, gaps and steady levels are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from holdfast.diagnostics.detectors.alone import Alone
from holdfast.diagnostics.detectors.degradation import Degradation
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.signals import GpuHealth, HostSample, NicSample

T0 = 1_700_000_000.0
GIB = 2**30


def gpu(t: float, **columns: int) -> GpuHealth:
    healthy = {
        field.name: (columns.get(field.name, 0),)
        for field in dataclasses.fields(GpuHealth)
        if field.name not in ("node", "at", "expected", "uuid", "gpu")
    }
    return GpuHealth(node="n0", at=T0 + t, expected=1, gpu=(0,), uuid=("GPU-1",), **healthy)


def port(t: float, **counters: int) -> NicSample:
    names = ("symbol_errors", "link_downed", "link_recoveries", "buffer_overruns", "integrity_errors", "rnr_retries")
    columns = {name: (counters.get(name, 0),) for name in (*names, "slow_restarts")}
    return NicSample("n0", T0 + t, ("mlx5_0",), (1,), ("InfiniBand",), ("ACTIVE",), ("LinkUp",), **columns)


def disk(t: float, used: float, total: float = 1000.0) -> HostSample:
    return HostSample("n0", T0 + t, 1.0, 8, 1, 100, (("/data", int(used * GIB), int(total * GIB)),))


def watch(
    reading: Callable[[float], GpuHealth | NicSample | HostSample], *, until_s: float = 1200.0, every_s: float = 15.0
) -> list[Finding]:
    detector, t = Alone(Degradation()), 0.0
    found: list[Finding] = []
    while t <= until_s:
        found += detector.observe(reading(t), T0 + t)
        t += every_s
    return found


TRENDS: list[Callable[[float], GpuHealth | NicSample | HostSample]] = [
    lambda t: gpu(t, ecc_corrected=int(t)),
    lambda t: gpu(t, nvlink_errors=int(t)),
    lambda t: gpu(t, thermal_slowdown_ns=int(t * 0.2e9)),
    lambda t: gpu(t, pcie_replays=int(t), pcie_width=16, pcie_gen=4),
    lambda t: port(t, symbol_errors=int(t * 20)),
    lambda t: port(t, link_recoveries=int(t / 6)),
    lambda t: disk(t, 800 + t / 60),
]
QUIET: list[Callable[[float], GpuHealth | NicSample | HostSample]] = [
    lambda t: gpu(t, ecc_corrected=100),
    lambda t: gpu(t, ecc_corrected=-1, nvlink_errors=-1, pcie_replays=-1),
    lambda t: gpu(t, ecc_corrected=500 if t > 600 else 0),  # one burst
    lambda t: gpu(t, thermal_slowdown_ns=int(t * 0.01e9)),
    lambda t: gpu(t, pcie_replays=int(t / 10), pcie_width=16, pcie_gen=4),
    lambda t: port(t, symbol_errors=int(t)),
    lambda t: disk(t, 800 + (t % 60) / 60),  # a file that comes and goes
    lambda t: disk(t, 100 + t / 60),  # has time
    lambda t: disk(t, 0, 0),
    lambda t: disk(1200 - t, 800 + t),  # a clock that runs backwards
]


@pytest.mark.parametrize("reading", TRENDS)
def test_a_trend_is_one_warning_with_its_numbers(
    reading: Callable[[float], GpuHealth | NicSample | HostSample],
) -> None:
    finding, *repeats = watch(reading)
    assert {each.id for each in repeats} <= {finding.id}
    assert [each.repeat for each in repeats] == [1][: len(repeats)]
    assert (finding.kind, finding.severity, finding.node) == (FindingKind.DEGRADATION, Severity.WARNING, "n0")
    assert float(finding.evidence["per_hour"]) > 0
    assert 480 <= float(finding.evidence["over_s"]) <= 700


@pytest.mark.parametrize("reading", QUIET)
def test_what_is_no_trend_says_nothing(reading: Callable[[float], GpuHealth | NicSample | HostSample]) -> None:
    assert watch(reading) == []


def test_a_driver_that_starts_again_starts_the_count_again() -> None:
    found = watch(lambda t: gpu(t, pcie_replays=int(t % 300), pcie_width=16, pcie_gen=4))
    assert found == []


def test_readings_hours_apart_are_no_rate() -> None:
    assert watch(lambda t: port(t, symbol_errors=int(t * 20)), until_s=36_000, every_s=3600) == []


def test_a_slow_disk_says_when_it_is_full() -> None:
    finding, *_ = watch(lambda t: disk(t, 800 + t / 60))
    assert float(finding.evidence["full_in_s"]) == pytest.approx(190 * 60, rel=0.1)
    assert "GiB an hour" in finding.summary
