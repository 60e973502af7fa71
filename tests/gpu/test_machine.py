"""What a node says of its real GPU: the self-tests, and NVML through the agent's reader."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import anyio
import pytest
import torch
from waiting import wait_until_async

from holdfast.agent.collectors.nvml import NvmlCollector
from holdfast.domain.signals import GpuHealth, GpuSample, NodeSignal


def selftest(*arguments: str) -> dict[str, Any]:
    """In a process of its own, as the agent's: it forks, which a process that has used a device cannot."""
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.train.selftest", *arguments],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    print(done.stdout, done.stderr)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_healthy_gpu_makes_no_wrong_product() -> None:
    devices = selftest("--budget-s", "0.5")["devices"]
    assert len(devices) == torch.cuda.device_count()
    for device in devices:
        assert "error" not in device, device
        assert {"float32", "tf32", "bfloat16", "float16"} == {products["kind"] for products in device["products"]}
        assert all(products["made"] and not products["wrong"] for products in device["products"]), device
        assert device["memory_gb_s"] > 500, "less than any GPU with HBM"


def test_the_quick_test_of_a_suspected_node_ends_in_time() -> None:
    devices = selftest("--within-s", "10")["devices"]
    assert len(devices) == torch.cuda.device_count()
    for device in devices:
        assert not device["unfinished"], device
        assert all(products["made"] and not products["wrong"] for products in device["products"]), device


@pytest.mark.anyio
async def test_the_agent_reads_the_driver() -> None:
    collector = NvmlCollector("n", expected=torch.cuda.device_count(), interval_s=0.2, call_deadline_s=10.0)
    seen = list[NodeSignal]()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(collector.run, seen.append)
        await wait_until_async(
            lambda: (
                len([one for one in seen if isinstance(one, GpuSample)]) >= 2
                and any(isinstance(one, GpuHealth) for one in seen)
            ),
            description="samples and health of the GPU",
            timeout_s=60,
        )
        tasks.cancel_scope.cancel()
    sample = next(one for one in seen if isinstance(one, GpuSample))
    health = next(one for one in seen if isinstance(one, GpuHealth))
    print(sample, health, collector.rejections, sep="\n")
    assert len(sample.uuid) == torch.cuda.device_count()
    assert all(uuid.startswith("GPU-") for uuid in sample.uuid)
    assert all(10 < celsius < 100 for celsius in sample.temperature_c)
    assert health.expected == torch.cuda.device_count()
