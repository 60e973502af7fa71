"""Ports, slow GPU health, maintenance and the host: warnings that say what is wrong once, and nothing of what is not known."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from diagnosing import CATALOGUE, T0
from hypothesis import given, settings
from values import value_of

from holdfast.diagnostics import detectors
from holdfast.diagnostics.detectors.gpu_health import GpuHealth
from holdfast.diagnostics.detectors.host_pressure import HostPressure
from holdfast.diagnostics.detectors.maintenance import Maintenance
from holdfast.diagnostics.detectors.nic_port import NicPort
from holdfast.diagnostics.engine import Engine
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.signals import GpuHealth as Health
from holdfast.domain.signals import HostSample, MaintenanceNotice, NicSample, NodeSignal, Tick


def judge(detector: object, *signals: NodeSignal) -> list[Finding]:
    engine = Engine([detector])  # type: ignore[list-item]
    found = [finding for signal in signals for finding in engine.fold(signal, signal.at).findings]
    assert {finding.severity for finding in found} <= {Severity.INFO, Severity.WARNING}, "none of these stops a run"
    return found


@given(tick=value_of(Tick))
@settings(max_examples=60, deadline=None)
def test_no_signal_however_odd_breaks_a_detector(tick: Tick) -> None:
    engine = Engine(detectors.standard(CATALOGUE))
    for signal in (*tick.signals, *reversed(tick.signals)):  # time goes backwards as well
        engine.fold(signal, T0)


# ------------------------------------------------------------------ ports


def nic(at: float, state: str = "ACTIVE", **counters: int) -> NicSample:
    columns = dict.fromkeys(
        ("symbol_errors", "link_downed", "link_recoveries", "buffer_overruns", "integrity_errors", "rnr_retries"), (0,)
    )
    columns |= {name: (value,) for name, value in counters.items()}
    return NicSample(
        "n0", T0 + at, ("mlx5_0",), (1,), ("InfiniBand",), (state,), ("LinkUp",), **columns, slow_restarts=(-1,)
    )


def gone(at: float) -> NicSample:
    return NicSample("n0", T0 + at, *((),) * 12)


def rules(found: list[Finding]) -> list[str]:
    assert all(finding.kind is FindingKind.NETWORK_FAULT for finding in found)
    return [finding.evidence["rule"] for finding in found]


def test_a_port_that_is_down_for_minutes_is_said_once() -> None:
    down = [nic(at, "DOWN") for at in range(5, 400, 5)]
    assert rules(judge(NicPort(), nic(0), *down)) == ["down"]


def test_an_unused_port_is_nobodys_fault() -> None:
    assert judge(NicPort(), *(nic(at, "DOWN") for at in range(0, 600, 5))) == []


def test_a_port_that_comes_and_goes_flaps() -> None:
    looks = [nic(at, "DOWN" if at % 100 < 40 else "ACTIVE") for at in range(95, 400, 5)]
    assert rules(judge(NicPort(), nic(0), *looks)) == ["flap"]


def test_a_device_that_leaves_is_missed_after_three_looks() -> None:
    assert rules(judge(NicPort(), nic(0), *(gone(at) for at in (5, 10, 15, 20)))) == ["missing"]


def test_fatal_counters_speak_when_they_grow_and_not_when_they_are_reset() -> None:
    found = judge(
        NicPort(), nic(0, link_downed=7), nic(60, link_downed=8), nic(120, link_downed=0), nic(180, rnr_retries=-1)
    )
    assert rules(found) == ["link_downed"]
    assert found[0].evidence["before"] == "7"


# ------------------------------------------------------------------ slow GPU health


def health(at: float, *, gpus: int = 2, expected: int = 2, **columns: int) -> Health:
    unknown = (-1,) * gpus
    names = (
        "ecc_corrected", "ecc_uncorrected_ever", "remapped_rows", "remap_pending", "remap_failed", "nvlinks_up",
        "nvlinks_down", "nvlink_errors", "pcie_replays", "pcie_width", "pcie_width_max", "pcie_gen", "pcie_gen_max",
        "utilization", "thermal_slowdown_ns", "power_brake_ns", "fabric_state", "fabric_health", "rejected",
    )  # fmt: skip
    values = dict.fromkeys(names, unknown) | {name: (value, *unknown[1:]) for name, value in columns.items()}
    uuids = tuple(f"GPU-{gpu}" for gpu in range(gpus))
    return Health("n0", T0 + at, expected, tuple(range(gpus)), uuids, margin_c=(math.inf,) * gpus, **values)


@pytest.mark.parametrize(
    ("columns", "rule"),
    [
        ({"gpus": 1}, "device_count"),
        ({"remap_failed": 1, "remap_pending": 1}, "remap_failed"),
        ({"remap_pending": 1}, "remap_pending"),
        ({"nvlinks_up": 17, "nvlinks_down": 1}, "nvlink_down"),
        ({"pcie_width": 8, "pcie_width_max": 16, "utilization": 90}, "pcie_width"),
        ({"pcie_gen": 1, "pcie_gen_max": 5, "utilization": 90}, "pcie_generation"),
        ({"fabric_state": 2}, "fabric"),
    ],
)
def test_what_a_gpu_lacks_is_said_once_when_it_holds(columns: dict[str, int], rule: str) -> None:
    (found,) = judge(GpuHealth(), *(health(30.0 * i, **columns) for i in range(5)))
    assert (found.kind, found.evidence["rule"]) == (FindingKind.GPU_ERROR, rule)
    assert judge(GpuHealth(), health(0, **columns), health(30), health(60, **columns)) == [], "one reading is none"


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"pcie_width": 8, "pcie_width_max": 16, "utilization": 0},
        {"nvlinks_up": 0, "nvlinks_down": 18},
        {"fabric_state": 0},
        {"fabric_state": 3},
        {"gpus": 2, "expected": 0},
    ],
)
def test_what_is_idle_unused_or_unknown_is_well(columns: dict[str, int]) -> None:
    assert judge(GpuHealth(), *(health(30.0 * i, **columns) for i in range(5))) == []


# ------------------------------------------------------------------ maintenance


def test_a_notice_has_its_time_and_can_be_withdrawn() -> None:
    first = MaintenanceNotice("n0", T0, "gce", "TERMINATE_ON_HOST_MAINTENANCE", T0 + 3600)
    again = replace(first, at=T0 + 60)  # the agent was restarted
    off = MaintenanceNotice("n0", T0 + 120, "gce", "")
    announced, withdrawn = judge(Maintenance(), first, again, off, replace(off, at=T0 + 180))
    assert "in 3600 s" in announced.summary
    assert withdrawn.evidence["withdraws"] == announced.id


# ------------------------------------------------------------------ the host


def host(at: float, **fields: object) -> HostSample:
    return replace(HostSample("n0", T0 + at, 1.0, 8, 1, 100), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "resource"),
    [
        ({"disk_latency": (("/d", 3.0),)}, "latency /d"),
        ({"disk_latency": (("/d", math.inf),)}, "latency /d"),
        ({"blocked": 20}, "blocked"),
        ({"clock_offset_s": -0.5}, "clock"),
        ({"files_left": 0, "files_max": 1024}, "descriptors"),
    ],
)
def test_the_host_is_pressed(fields: dict[str, object], resource: str) -> None:
    found = judge(HostPressure(), host(0, **fields), host(5), host(30, **fields))
    assert [finding.evidence["resource"] for finding in found] == [resource]


def test_numbers_that_are_none_press_nothing() -> None:
    fields = {"disk_latency": (("/d", math.nan),), "clock_offset_s": math.nan, "blocked": 0}
    assert judge(HostPressure(), *(host(at, **fields) for at in range(5))) == []
