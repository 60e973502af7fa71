"""What the machines report for half an hour, through the real detectors and the core: each state that lasts is one question."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from diagnosing import CATALOGUE
from fleet import Fleet, job, running

from holdfast.agent.troubles import REPEAT_S
from holdfast.diagnostics import detectors
from holdfast.diagnostics.engine import Engine
from holdfast.domain.evolve import evolve
from holdfast.domain.incidents import Action, ActionKind
from holdfast.domain.replication import TroubleKind
from holdfast.domain.signals import (
    CheckpointTrouble,
    GpuHealth,
    HealthChecks,
    HostSample,
    KernelEvent,
    KernelLine,
    NicSample,
    NodeSignal,
    Verdict,
)
from holdfast.supervisor.protocol import FindingArrived, JobPhase

EVERY_S = 30.0
Reading = Callable[[float, bool], NodeSignal | None]  # of node n1 at this time, with the fault or without


def port(at: float, *, state: str = "ACTIVE", link_downed: int = 0, devices: int = 1) -> NicSample:
    columns = {
        each.name: (0,) * devices for each in fields(NicSample) if each.name not in ("node", "at", "device", "state")
    }
    columns |= {"link_downed": (link_downed,) * devices}
    texts = {"link_layer": ("InfiniBand",) * devices, "phys_state": ("LinkUp",) * devices}
    known = {name: value for name, value in texts.items() if name in columns}
    return NicSample(node="n1", at=at, device=("mlx5_0",) * devices, state=(state,) * devices, **{**columns, **known})  # type: ignore[arg-type]


def gpu(at: float, **columns: int) -> GpuHealth:
    named = ("node", "at", "expected", "uuid", "gpu")
    values = {each.name: (columns.get(each.name, -1),) for each in fields(GpuHealth) if each.name not in named}
    healthy = GpuHealth(node="n1", at=at, expected=1, gpu=(0,), uuid=("GPU-1",), **values)
    return replace(healthy, margin_c=(math.inf,))


def host(at: float, *, memory: int = 50, disk: int = 10, latency_s: float = 0.01) -> HostSample:
    return HostSample("n1", at, 1.0, 8, memory, 100, (("/data", disk, 100),), disk_latency=(("/data", latency_s),))


def check(at: float, verdict: Verdict) -> HealthChecks:
    return HealthChecks("n1", at, "nvrx 0.4.1", ("nic",), (-1,), (verdict,), ("link is down",))


def disk_line(at: float) -> KernelLine:
    text = "nvme nvme0: I/O 12 QID 3 timeout, aborting"
    return KernelLine("n1", at, text, event=KernelEvent.NVME_TIMEOUT)


def full_tier(at: float) -> CheckpointTrouble | None:
    """As the agent passes it on: again after five minutes."""
    reported = at % REPEAT_S < EVERY_S
    return (
        CheckpointTrouble("n1", 1.0, job().name, TroubleKind.TIER_FAILS, "disk", "no space left") if reported else None
    )


READINGS: dict[str, Reading] = {
    "a port that is down": lambda at, bad: port(at, state="DOWN" if bad else "ACTIVE"),
    "a port that has left": lambda at, bad: port(at, devices=0 if bad else 1),
    "a port that counts errors": lambda at, bad: port(at, link_downed=int(at % 1e6) if bad else 0),
    "a narrow PCIe link": lambda at, bad: gpu(at, pcie_width=8 if bad else 16, pcie_width_max=16, utilization=90),
    "a memory that is full": lambda at, bad: host(at, memory=97 if bad else 50),
    "a disk that is slow": lambda at, bad: host(at, latency_s=5.0 if bad else 0.01),
    "a disk that cannot be written to": lambda at, bad: host(at, latency_s=math.inf if bad else 0.01),
    "another tool's check": lambda at, bad: check(at, Verdict.FAILED if bad else Verdict.OK),
    "lines of the kernel": lambda at, bad: disk_line(at) if bad else None,
    "a tier that takes no copies": lambda at, bad: full_tier(at) if bad else None,
    "a disk that is full": lambda at, bad: host(at, disk=98 if bad else 10),
    "a counter that grows": lambda at, bad: gpu(at, ecc_corrected=int(at % 1e6) if bad else 0),
}


class Machine:
    """The readings of node n1 in a job that trains."""

    def __init__(self, reading: Reading) -> None:
        self.fleet: Fleet = running(evolve(job(dp=3), steps=1_000_000), spares=1, saved=10)
        self.engine, self.reading = Engine(detectors.standard(CATALOGUE), gap_after_s=math.inf), reading

    def passes(self, seconds: float, *, bad: bool) -> None:
        until = self.fleet.now + seconds
        while self.fleet.now < until:
            self.fleet.wait(EVERY_S)
            self.fleet.train(self.fleet.job.progress.step + 1)
            if (signal := self.reading(self.fleet.now, bad)) is not None:
                for finding in self.engine.fold(signal, self.fleet.now).findings:
                    self.fleet.fold(FindingArrived(self.fleet.now, finding))

    def actions(self) -> list[Action]:
        return [each.action for each in self.fleet.state.closed if each.action is not None]


@pytest.mark.parametrize("name", READINGS)
def test_a_state_that_lasts_is_asked_about_once(name: str) -> None:
    machine = Machine(READINGS[name])
    machine.passes(120.0, bad=False)
    machine.passes(7200.0, bad=True)
    assert [action.kind for action in machine.actions()] == [ActionKind.NOTIFY]
    assert machine.fleet.job.phase is JobPhase.RUNNING
    assert machine.fleet.job.number == 1


@pytest.mark.parametrize("name", READINGS)
def test_a_state_that_passes_by_itself_is_recorded(name: str) -> None:
    machine = Machine(READINGS[name])
    machine.passes(120.0, bad=False)
    machine.passes(420.0, bad=True)
    machine.passes(3 * 3600.0, bad=False)
    assert machine.actions() == []


def test_what_comes_again_after_hours_has_not_lasted() -> None:
    machine = Machine(READINGS["a disk that is slow"])
    for _ in range(4):
        machine.passes(420.0, bad=True)
        machine.passes(3600.0, bad=False)
    assert machine.actions() == []
