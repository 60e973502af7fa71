"""Cases of suite `actions` for every warning of docs/diagnostics.md, from the signals of agents through the real detectors to
the action of the default policy. A run that can continue is changed for four reasons only: a node that costs more than its
replacement, a GPU that waits for a reset, a board that has links down or is not in its NVLink fabric, and a machine that is
taken away.

The right actions follow from the public monitors that are the sources of the thresholds (gpud, NVSentinel, DCGM): all other
warnings are for operators, or for the time when the job next stops.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.detection.actions_expected import Rung
from benchmarks.detection.actions_fleet import JOB, NODES, T0, Fleet
from holdfast.agent.collectors.kernel_lines import recognise
from holdfast.domain.findings import FindingKind
from holdfast.domain.nodes import Check, Preflight
from holdfast.domain.replication import TroubleKind
from holdfast.domain.signals import (
    CheckpointTrouble,
    ClockTick,
    CollectorSilent,
    GpuHealth,
    HealthChecks,
    HostSample,
    KernelLine,
    MaintenanceNotice,
    NicSample,
    NodeBeat,
    NodeTested,
    Phase,
    RankProgress,
    ReplicaChecks,
    StepColumns,
    Verdict,
)

NODE = "n1"
_RANK = 1
_NAN = float("nan")
_GIB = 2**30
_K = FindingKind
_NO_COUNTS: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Warned:
    """A case. `drive` lets agents send signals that lead to a warning of this kind."""

    name: str
    kind: FindingKind
    drive: Callable[[Fleet], None]
    rung: Rung = Rung.NOTHING


# ---------------------------------------------------------------- readings of the machine


def _gpu(fleet: Fleet, **columns: int) -> None:
    """Send one reading of a node with one GPU; all other values are healthy."""
    healthy = {"pcie_width": 16, "pcie_width_max": 16, "pcie_gen": 5, "pcie_gen_max": 5, "utilization": 99} | columns
    names = [field.name for field in dataclasses.fields(GpuHealth)][5:]
    values: dict[str, Any] = {name: (healthy.get(name, 0),) for name in names}
    fleet.see(GpuHealth(NODE, fleet.now, columns.get("expected", 1), (0,), ("GPU-1",), **values))


def _readings(**columns: int) -> Callable[[Fleet], None]:
    """Send the same reading three times, 30 s apart."""

    def drive(fleet: Fleet) -> None:
        for _ in range(3):
            fleet.now += 30.0
            _gpu(fleet, **columns)

    return drive


def _rising(send: Callable[[Fleet, Mapping[str, int]], None], **per_s: float) -> Callable[[Fleet], None]:
    """Send counters that grow for twenty minutes."""

    def drive(fleet: Fleet) -> None:
        for second in range(0, 1200, 15):
            fleet.now += 15.0
            send(fleet, {name: int(rate * second) for name, rate in per_s.items()})

    return drive


def _growing(**per_s: float) -> Callable[[Fleet], None]:
    return _rising(lambda fleet, counters: _gpu(fleet, **counters), **per_s)


def _port(fleet: Fleet, state: str = "ACTIVE", counters: Mapping[str, int] = _NO_COUNTS) -> None:
    names = "symbol_errors link_downed link_recoveries buffer_overruns integrity_errors rnr_retries slow_restarts"
    columns = {name: (counters.get(name, 0),) for name in names.split()}
    fleet.see(NicSample(NODE, fleet.now, ("mlx5_0",), (1,), ("InfiniBand",), (state,), ("LinkUp",), **columns))


def _ports(*states: tuple[float, str]) -> Callable[[Fleet], None]:
    """Send the states of a port: (duration in seconds, state)."""

    def drive(fleet: Fleet) -> None:
        for seconds, state in states:
            for _ in range(int(seconds // 5)):
                fleet.now += 5.0
                _port(fleet, state)

    return drive


def _port_gone(fleet: Fleet) -> None:
    _port(fleet)
    for _ in range(4):
        fleet.now += 5.0
        fleet.see(NicSample(NODE, fleet.now, *((),) * 12))


def _counting(**per_s: float) -> Callable[[Fleet], None]:
    return _rising(lambda fleet, counters: _port(fleet, counters=counters), **per_s)


def _one_more(counter: str) -> Callable[[Fleet], None]:
    def drive(fleet: Fleet) -> None:
        _port(fleet)
        fleet.now += 5.0
        _port(fleet, counters={counter: 1})

    return drive


def _host(**changes: object) -> Callable[[Fleet], None]:
    def drive(fleet: Fleet) -> None:
        sample = HostSample(NODE, fleet.now, 1.0, 8, 1, 100)
        fleet.see(dataclasses.replace(sample, **changes))  # type: ignore[arg-type]

    return drive


def _filling(fleet: Fleet) -> None:
    for second in range(0, 1200, 15):
        fleet.now += 15.0
        disk = ("/data", int((800 + second / 60) * _GIB), 1000 * _GIB)
        fleet.see(HostSample(NODE, fleet.now, 1.0, 8, 1, 100, (disk,)))


def _line(text: str) -> Callable[[Fleet], None]:
    def drive(fleet: Fleet) -> None:
        fleet.now += 1.0
        line = recognise(text)
        assert line is not None, f"the agent does not recognise {text!r}"
        fleet.see(KernelLine(NODE, fleet.now, line.text, line.xid, line.pci, None, line.event))

    return drive


def _checks(check: str) -> Callable[[Fleet], None]:
    def drive(fleet: Fleet) -> None:
        for _ in range(3):
            fleet.now += 60.0
            failed = (Verdict.FAILED,)
            fleet.see(HealthChecks(NODE, fleet.now, "nvrx 0.5", (check,), (0,), failed, ("it failed",)))

    return drive


def _silent(collector: str) -> Callable[[Fleet], None]:
    return lambda fleet: fleet.see(CollectorSilent(NODE, fleet.now, collector, 4, "no answer in 15 s"))


def _maintenance(fleet: Fleet) -> None:
    fleet.see(MaintenanceNotice(NODE, fleet.now, "file", "TERMINATE_ON_HOST_MAINTENANCE", fleet.now + 30.0))


def _preflight(fleet: Fleet) -> None:
    node = "n3" if "n3" in fleet.state.nodes else NODE
    checks = (Check("disk", False, "/data is 97 % full"),)
    fleet.see(NodeTested(node, fleet.now, Preflight(fleet.now, 1.0, checks)))


def _trouble(kind: TroubleKind) -> Callable[[Fleet], None]:
    return lambda fleet: fleet.see(CheckpointTrouble(NODE, fleet.now, JOB, kind, "/data", "no space is left", _RANK))


# ---------------------------------------------------------------- signals of ranks


def _steps(
    fleet: Fleet,
    count: int,
    *,
    own_s: Sequence[float] = (1.0, 1.0, 1.0),
    wait_s: float = 0.0,  # in addition to the wait for the slowest rank
    loss: Callable[[int], float] = lambda step: 2.0,
    norm: float = 1.0,
    local_norm: Sequence[float] = (1.0, 1.0, 1.0),
    tokens: Sequence[int] = (100, 100, 100),
    silent: Sequence[str] = (),
) -> None:
    """Let every rank finish `count` steps, each as long as the slowest rank needs."""
    duration_s = max(own_s) + wait_s
    first = fleet.job.progress.step + 1
    for step in range(first, first + count):
        fleet.now += duration_s
        fleet.see(*(NodeBeat(node, fleet.now) for node in fleet.state.nodes if node not in fleet.nodes()))
        for rank, node in enumerate(fleet.nodes()):
            if node in silent:
                continue
            at, number = fleet.now, fleet.job.number
            fleet.see(
                NodeBeat(node, at),
                StepColumns(
                    node, at, JOB, number, (rank,), (step,), (at - duration_s,), (at,), (0.0,), (0.0,), (tokens[rank],),
                    (loss(step),), (norm if rank == 0 else _NAN,), (duration_s - own_s[rank],), (local_norm[rank],),
                ),
                RankProgress(node, at, JOB, number, (rank,), (step,), (Phase.STEP,), (at,), ("R",), (at - T0,), (-1,)),
            )  # fmt: skip
        fleet.see(ClockTick(fleet.now))


def _slow(own_s: Sequence[float], tokens: Sequence[int] = (100, 100, 100)) -> Callable[[Fleet], None]:
    """Let ranks be slow for a quarter of an hour."""

    def drive(fleet: Fleet) -> None:
        _steps(fleet, 40)
        for _ in range(900):
            if fleet.decided:
                break
            _steps(fleet, 1, own_s=own_s, tokens=tokens)

    return drive


def _slow_network(fleet: Fleet) -> None:
    _steps(fleet, 60)
    _steps(fleet, 700, wait_s=0.5)


def _loss_spike(fleet: Fleet) -> None:
    _steps(fleet, 80, loss=lambda step: 2.0 + 0.001 * (step % 7))
    _steps(fleet, 3, loss=lambda step: 20.0)


def _norm_spike(fleet: Fleet) -> None:
    for step in range(80):
        _steps(fleet, 1, norm=1.0 + 0.01 * (step % 7))
    _steps(fleet, 2, norm=500.0)


def _odd_gradient(fleet: Fleet) -> None:
    for step in range(80):
        noise = 0.01 * (step % 7)
        _steps(fleet, 1, local_norm=(1.0 + noise, 1.01 + noise, 0.99 + noise))
    _steps(fleet, 3, local_norm=(1.0, 1000.0, 1.0))


def _agent_silent(fleet: Fleet) -> None:
    _steps(fleet, 10)
    _steps(fleet, 20, silent=(NODE,))


def _standstill(fleet: Fleet) -> None:
    """Let every rank sleep; no flight recorder answers."""
    _steps(fleet, 30)
    since, done = fleet.now, fleet.job.progress.step
    for _ in range(int(3 * 30.0)):
        fleet.now += 1.0
        for rank, node in enumerate(fleet.nodes()):
            fleet.see(
                NodeBeat(node, fleet.now),
                RankProgress(
                    node, fleet.now, JOB, 1, (rank,), (done,), (Phase.STEP,), (since,), ("S",), (30.0,), (-1,)
                ),
            )
        fleet.see(ClockTick(fleet.now))


def _no_progress(fleet: Fleet) -> None:
    """Simulate a script that reports no steps: 30 optimizer steps of every rank are observed, and then none."""
    for second in range(430):
        fleet.now += 1.0
        for rank, node in enumerate(fleet.nodes()):
            fleet.see(
                NodeBeat(node, fleet.now),
                RankProgress(
                    node, fleet.now, JOB, 1, (rank,), (0,), (Phase.INIT,), (T0,), ("S",), (30.0,), (-1,),
                    observed=(min(second, 30),) if second else (),
                ),
            )  # fmt: skip
        fleet.see(ClockTick(fleet.now))


def _never_agreed(fleet: Fleet) -> None:
    for step in (10, 20, 30):
        for rank, node in enumerate(fleet.nodes()):
            fleet.see(ReplicaChecks(node, fleet.now, JOB, 1, (rank,), (step,), (f"{rank}-{step}",), (0.1,), (False,)))
        fleet.now += 10.0
        fleet.see(ClockTick(fleet.now))


SLOW = (1.0, 1.4, 1.0)
WARNINGS = (
    Warned("straggler", _K.STRAGGLER, _slow(SLOW), Rung.SWAP_LATER),
    Warned("imbalance of data", _K.IMBALANCE, _slow((1.0, 1.4, 1.0), (100, 140, 100))),
    Warned("slow collective", _K.SLOW_COLLECTIVE, _slow_network),
    Warned("agent silent, steps go on", _K.NODE_LOST, _agent_silent),
    Warned("standstill without proof", _K.HANG, _standstill),
    Warned("no progress is seen", _K.NO_PROGRESS, _no_progress),
    Warned("loss spike", _K.NUMERICAL, _loss_spike),
    Warned("gradient spike", _K.NUMERICAL, _norm_spike),
    Warned("gradient of one rank", _K.NUMERICAL, _odd_gradient),
    Warned("replicas never agreed", _K.SILENT_CORRUPTION, _never_agreed),
    *(Warned(f"checkpoint {kind}", _K.CHECKPOINT, _trouble(kind)) for kind in TroubleKind),
    Warned("pre-flight test", _K.PREFLIGHT, _preflight),
    Warned("fewer devices", _K.GPU_ERROR, _readings(expected=2)),
    Warned("row remap pending", _K.GPU_ERROR, _readings(remap_pending=1), Rung.RESET_LATER),
    Warned("row remap failed", _K.GPU_ERROR, _readings(remap_failed=1)),
    Warned("NVLink down", _K.GPU_ERROR, _readings(nvlinks_up=17, nvlinks_down=1), Rung.RESET_LATER),
    Warned("PCIe narrow", _K.GPU_ERROR, _readings(pcie_width=8)),
    Warned("PCIe slow", _K.GPU_ERROR, _readings(pcie_gen=3)),
    Warned("not in its fabric", _K.GPU_ERROR, _readings(fabric_state=2), Rung.RESET_LATER),
    Warned("NVML silent", _K.GPU_ERROR, _silent("nvml")),
    Warned("second opinion: GPU", _K.GPU_ERROR, _checks("gpu")),
    Warned("second opinion: NIC", _K.NETWORK_FAULT, _checks("nic")),
    Warned("process killed for memory", _K.HOST_OOM, _line("Out of memory: Killed process 42 (python) total-vm:1kB")),
    Warned("soft lockup", _K.KERNEL_STALL, _line("watchdog: BUG: soft lockup - CPU#1 stuck for 22s! [python:42]")),
    Warned("hung task", _K.KERNEL_STALL, _line("INFO: task python:42 blocked for more than 120 seconds.")),
    Warned("NVMe timeout", _K.STORAGE_FAULT, _line("nvme nvme0: I/O 5 QID 2 timeout, aborting")),
    Warned("read-only", _K.STORAGE_FAULT, _line("EXT4-fs (nvme1n1p1): Remounting filesystem read-only")),
    Warned(
        "mlx5 health", _K.NETWORK_FAULT,
        _line("mlx5_core 0000:5e:00.0: poll_health:841:(pid 0): device's health compromised - reached miss count"),
    ),
    Warned(
        "mlx5 command", _K.NETWORK_FAULT,
        _line(
            "mlx5_core 0000:5e:00.1: wait_func:1153:(pid 42): MODIFY_SQ(0x905) timeout. "
            "Will cause a leak of a command resource"
        ),
    ),
    Warned("machine check", _K.HOST_PRESSURE, _line("mce: [Hardware Error]: Machine check events logged")),
    Warned("port down", _K.NETWORK_FAULT, _ports((10.0, "ACTIVE"), (300.0, "DOWN"))),
    Warned("port flaps", _K.NETWORK_FAULT, _ports(*((10.0, "ACTIVE"), (40.0, "DOWN")) * 4, (10.0, "ACTIVE"))),
    Warned("port missing", _K.NETWORK_FAULT, _port_gone),
    *(
        Warned(f"port counts {counter}", _K.NETWORK_FAULT, _one_more(counter))
        for counter in ("link_downed", "buffer_overruns", "integrity_errors", "rnr_retries")
    ),
    Warned("memory full", _K.HOST_PRESSURE, _host(memory_used=97)),
    Warned("disk full", _K.HOST_PRESSURE, _host(disks=(("/data", 97 * _GIB, 100 * _GIB),))),
    Warned("disk slow", _K.HOST_PRESSURE, _host(disk_latency=(("/data", 3.0),))),
    Warned("disk dead", _K.HOST_PRESSURE, _host(disk_latency=(("/data", math.inf),))),
    Warned("tasks blocked", _K.HOST_PRESSURE, _host(blocked=64)),
    Warned("clock off", _K.HOST_PRESSURE, _host(clock_offset_s=0.5)),
    Warned("collector silent", _K.HOST_PRESSURE, _silent("infiniband")),
    Warned("PCIe replays", _K.DEGRADATION, _growing(pcie_replays=2.0)),
    Warned("NVLink errors", _K.DEGRADATION, _growing(nvlink_errors=1.0)),
    Warned("corrected memory errors", _K.DEGRADATION, _growing(ecc_corrected=1.0)),
    Warned("clocks throttled", _K.DEGRADATION, _growing(thermal_slowdown_ns=0.2e9)),
    Warned("symbol errors", _K.DEGRADATION, _counting(symbol_errors=20.0)),
    Warned("link recoveries", _K.DEGRADATION, _counting(link_recoveries=1 / 6)),
    Warned("RoCE restarts", _K.DEGRADATION, _counting(slow_restarts=20.0)),
    Warned("disk fills", _K.DEGRADATION, _filling),
    Warned("maintenance", _K.MAINTENANCE, _maintenance, Rung.LEAVE),
)  # fmt: skip
assert NODES > _RANK
