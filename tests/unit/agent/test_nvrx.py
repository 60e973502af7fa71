"""The health checks of nvidia-resiliency-ext through the real reader process: each API of it, the real 0.4, a bad one."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import anyio
import pytest
from diagnosing import T0
from waiting import wait_until_async

from holdfast.agent.collectors.nvrx import PACKAGE, NvrxCollector, build
from holdfast.agent.collectors.protocol import Surroundings
from holdfast.diagnostics.detectors.alone import Alone
from holdfast.diagnostics.detectors.second_opinion import SecondOpinion
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.signals import HealthChecks, NodeSignal, Verdict

pytestmark = pytest.mark.anyio

# Two GPUs of which the driver wants the second one reset.
PYNVML = """
from types import SimpleNamespace as N
class NVMLError(Exception): pass
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
NVML_GPU_RECOVERY_ACTION_NONE, NVML_GPU_RECOVERY_ACTION_GPU_RESET, NVML_GPU_RECOVERY_ACTION_NODE_REBOOT = 0, 1, 2
NVML_GPU_RECOVERY_ACTION_DRAIN_P2P, NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET = 3, 4
def nvmlInit(): pass
def nvmlShutdown(): pass
def nvmlDeviceGetCount(): return 2
def nvmlSystemGetDriverVersion(): return "570.86"
def nvmlDeviceGetHandleByIndex(i): return i
def nvmlDeviceGetPciInfo(i): return N(busId="00000000:0%d:00.0" % i)
def nvmlDeviceGetFieldValues(i, fields): return [N(value=N(uiVal=i))]
"""
# In the manner of 0.4, and of 0.6.
OLD = """
import logging
class GPUHealthCheck:
    enabled = True
    def __call__(self):
        logging.getLogger("nvrx").warning("GPU 1: Requires a reset")
        return False
class NicHealthCheck:
    nic_name = None
    def set_nic_device(self, rank): self.nic_name = "mlx5_0" if rank == 0 else None
    def __call__(self): return True
"""
NEW = """
class GPUHealthCheck:
    def __init__(self, device_index=None, interval=60): self.device_index = device_index
    def __call__(self): return self.device_index == 0
class NVLHealthCheck(GPUHealthCheck):
    pynvml_available = False
class NicLinkStateHealthCheck:
    def __init__(self, link_state_path_template=None): pass
    def __call__(self): raise OSError("no such port")
"""


class Here(NvrxCollector):
    """With directories in front of everything else that Python finds."""

    def __init__(self, *directories: Path) -> None:
        super().__init__("n", interval_s=0.05, deadline_s=20.0)
        self._directories = directories

    def environment(self) -> Mapping[str, str]:
        above = [os.environ.get("PYTHONPATH", "")]
        return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, self._directories), *above])}


def install(root: Path, version: str, module: str) -> Path:
    package = root / PACKAGE / "shared_utils"
    package.mkdir(parents=True)
    (package / "health_check.py").write_text(module)
    about = root / f"{PACKAGE}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-resiliency-ext\nVersion: {version}\n")
    (root / "pynvml.py").write_text(PYNVML)
    return root


async def first(collector: NvrxCollector) -> HealthChecks:
    seen = list[NodeSignal]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collector.run, seen.append)
        await wait_until_async(lambda: bool(seen), description="its first word")
        tasks.cancel_scope.cancel()
    assert isinstance(seen[0], HealthChecks)
    return seen[0]


def rows(found: HealthChecks) -> list[tuple[str, int, str]]:
    return list(zip(found.check, found.gpu, map(str, found.verdict), strict=True))


async def test_version_0_4_has_one_check_over_all_gpus_and_no_nvlink(tmp_path: Path) -> None:
    found = await first(Here(install(tmp_path, "0.4.1", OLD)))
    assert found.tool == "nvrx 0.4.1"
    assert rows(found) == [("gpu", -1, "failed"), ("nic", 0, "ok"), ("nic", 1, "skipped")]
    assert found.reason[0] == "GPU 1: Requires a reset"


async def test_later_versions_are_asked_gpu_by_gpu_and_cannot_look_is_not_healthy(tmp_path: Path) -> None:
    found = await first(Here(install(tmp_path, "0.6.0", NEW)))
    assert rows(found) == [
        ("gpu", 0, "ok"),
        ("gpu", 1, "failed"),
        ("nvlink", 0, "skipped"),
        ("nvlink", 1, "skipped"),
        ("nic_state", -1, "skipped"),
    ]
    assert found.reason[4] == "OSError: no such port"


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("import a_module_that_nobody_has", "ModuleNotFoundError: No module named 'a_module_that_nobody_has'"),
        ("class GPUHealthCheck:\n    def __init__(self, more): pass", "TypeError"),
        ("", "has none of the checks GPUHealthCheck"),
    ],
    ids=["import", "arguments", "empty"],
)
async def test_one_that_cannot_be_used_says_why(tmp_path: Path, module: str, words: str) -> None:
    with pytest.raises(OSError, match=words):
        await Here(install(tmp_path, "9.0.0", module)).run(lambda _: None)


async def test_the_real_one(tmp_path: Path) -> None:
    beside = Path(sys.prefix) / "peers"
    there = importlib.util.find_spec(PACKAGE) is not None
    if not there and not (beside / PACKAGE).is_dir():
        pytest.skip(f"nvidia-resiliency-ext is neither installed nor in {beside} (make bench-recovery puts it there)")
    (tmp_path / "pynvml.py").write_text(PYNVML)
    found = await first(Here(tmp_path, *([] if there else [beside])))
    assert found.tool.startswith("nvrx 0.")
    assert "failed" in [verdict for check, _, verdict in rows(found) if check == "gpu"]
    assert any("Requires a reset" in reason for reason in found.reason)


def test_it_is_built_where_there_is_something_to_look_at(tmp_path: Path) -> None:
    install(tmp_path, "0.4.1", OLD)
    place = Surroundings("n", tmp_path, tmp_path, tmp_path, tmp_path / "k", infiniband=tmp_path, nvrx_path=tmp_path)
    assert isinstance(build(place), NvrxCollector)


def test_garbage_from_it_is_counted() -> None:
    collector = NvrxCollector("n")
    good = {"at": 1.0, "version": "0.4.1", "checks": [{"check": "gpu", "gpu": None, "verdict": "ok", "reason": ""}]}
    assert len(collector.take(json.dumps(good).encode())) == 1
    for bad in (
        {},
        {**good, "checks": [{}]},
        {**good, "checks": [{"check": "gpu", "gpu": 0, "verdict": "?", "reason": ""}]},
    ):
        assert collector.take(json.dumps(bad).encode()) == []
    assert collector.rejections["garbage"] == 3


def checks(at: float, verdict: Verdict, check: str = "gpu") -> HealthChecks:
    return HealthChecks("n0", at, "nvrx 0.6.0", (check,), (1,), (verdict,), ("Requires a reset",))


def test_two_failures_in_a_row_are_one_warning_and_blindness_proves_nothing() -> None:
    detector, found = Alone(SecondOpinion()), list[Finding]()
    said = [Verdict.FAILED, Verdict.SKIPPED, Verdict.FAILED, Verdict.FAILED, Verdict.OK, Verdict.FAILED]
    for second, verdict in enumerate(said):
        found += detector.observe(checks(T0 + second, verdict), T0 + second)
    warning, over = found
    assert (over.severity, over.contradicts) == (Severity.INFO, warning.id)
    assert (warning.kind, warning.severity, warning.gpu) == (FindingKind.GPU_ERROR, Severity.WARNING, 1)
    assert warning.summary == "nvrx 0.6.0 fails its check gpu on GPU 1 of n0: Requires a reset"
    detector = Alone(SecondOpinion())
    for second in range(2):
        reported = detector.observe(checks(T0 + second, Verdict.FAILED, "nic"), T0 + second)
    assert reported[0].kind is FindingKind.NETWORK_FAULT
