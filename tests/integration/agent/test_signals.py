"""From what a machine says to what is concluded: recorded sources, the real collectors, the wire, all detectors."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
from waiting import wait_until_async

from holdfast.agent.collectors.nvml import NvmlCollector
from holdfast.agent.collectors.protocol import Surroundings, keep_collecting
from holdfast.agent.collectors.registry import build_all
from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.engine import Engine
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.signals import GpuHealth, MaintenanceNotice, NicSample, NodeSignal, Tick
from holdfast.v1 import telemetry_pb2 as pb
from holdfast.wire.telemetry import decode_tick, encode_tick

DATA = Path(__file__).parents[2] / "data"


def conclude(signals: list[NodeSignal]) -> list[Finding]:
    """What diagnostics makes of them after a trip through bytes."""
    engine = Engine(detectors.standard(xid.load()))
    raw = encode_tick(Tick("n", "i", 1, signals[0].at, tuple(signals))).SerializeToString()
    tick = decode_tick(pb.Tick.FromString(raw))
    return [finding for signal in tick.signals for finding in engine.fold(signal, signal.at).findings]


@pytest.mark.anyio
async def test_a_recorded_gpu_fault_is_one_finding_with_its_reasons() -> None:
    seen = list[NodeSignal]()
    collector = NvmlCollector("n", expected=2, replay=DATA / "nvml/two_gpus.jsonl", interval_s=0.01)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collector.run, seen.append)
        await wait_until_async(
            lambda: sum(isinstance(s, GpuHealth) for s in seen) >= 2, description="two readings of slow health"
        )
        tasks.cancel_scope.cancel()
    found = conclude(seen)
    faults = [finding for finding in found if finding.severity is Severity.ERROR]
    assert len(faults) == 1, [finding.summary for finding in faults]  # the Xid and the recovery action are one fault
    assert faults[0].gpu == 1
    warnings = {finding.evidence["rule"] for finding in found if finding.severity is Severity.WARNING}
    assert {"remap_pending", "nvlink_down", "pcie_width"} <= warnings


@pytest.mark.anyio
async def test_every_collector_that_is_configured_speaks(tmp_path: Path) -> None:
    for line in (DATA / "infiniband/node.txt").read_text().splitlines():
        name, _, content = line.partition("=")
        path = tmp_path / "infiniband" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    (tmp_path / "kernel.log").touch()
    (tmp_path / "notice").write_text("host maintenance")
    around = Surroundings(
        node="n",
        agent_dir=tmp_path,
        memory_dir=tmp_path,
        disk_dir=tmp_path,
        kernel_log=tmp_path / "kernel.log",
        nvml_replay=DATA / "nvml/two_gpus.jsonl",
        infiniband=tmp_path / "infiniband",
        maintenance_file=tmp_path / "notice",
    )
    seen = list[NodeSignal]()
    wanted = {"KernelLine", "GpuSample", "GpuHealth", "NicSample", "HostSample", "MaintenanceNotice"}
    async with anyio.create_task_group() as tasks:
        for collector in build_all(around):
            tasks.start_soon(keep_collecting, collector, "n", seen.append)
        await wait_until_async((tmp_path / "kernel-log.json").exists, description="the kernel log to be followed")
        with (tmp_path / "kernel.log").open("a") as log:
            log.write("Out of memory: Killed process 4242 (python)\n")
        await wait_until_async(lambda: wanted <= {type(s).__name__ for s in seen}, description="all of them")
        tasks.cancel_scope.cancel()
    assert any(isinstance(signal, NicSample) and len(signal.port) == 3 for signal in seen)
    assert any(isinstance(signal, MaintenanceNotice) for signal in seen)
    assert {FindingKind.HOST_OOM, FindingKind.MAINTENANCE} <= {finding.kind for finding in conclude(seen)}
