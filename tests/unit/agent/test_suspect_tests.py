"""The quick tests of a suspected node: what they conclude, what they leave open, and that nothing waits for them too long."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from waiting import VIRTUAL_TIME

from holdfast.agent.checks.active_ports import ActivePorts
from holdfast.agent.checks.suspect_tests import SuspectTests
from holdfast.domain.errors import Unavailable
from holdfast.domain.nodes import Check, Preflight
from holdfast.domain.signals import GpuSample, NicSample

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME], ids=["virtual"])]

GPU = {"products": [{"kind": "tf32", "made": 90, "wrong": 0, "first_wrong": ""}], "memory_gb_s": 1500.0}
WRONG = {"products": [{"kind": "tf32", "made": 90, "wrong": 1, "first_wrong": "product 3"}], "memory_gb_s": 1500.0}
LATE = {"unfinished": "its time was over"}


def printed(*devices: dict[str, Any], wrong: int = 0, unfinished: str = "", **more: Any) -> str:
    tested = [{"device": f"cuda:{index}", "unfinished": "", **each} for index, each in enumerate(devices)]
    links = {"ranks": len(devices), "wrong": wrong, "unfinished": unfinished}
    return json.dumps({"devices": tested, "all_reduce": links, **more})


def ports(*states: str) -> NicSample:
    count = len(states)
    zeros = (0,) * count
    names = tuple(f"mlx5_{index}" for index in range(count))
    return NicSample(
        "n0", 1.0, names, (1,) * count, ("InfiniBand",) * count, states, ("Polling",) * count, *[zeros] * 7
    )


def gpus(*lost: int) -> GpuSample:
    fields: dict[str, Any] = {
        each: tuple(0 for _ in lost) for each in GpuSample.__dataclass_fields__ if each not in ("node", "at")
    }
    return GpuSample("n0", 1.0, **{**fields, "gpu": tuple(range(len(lost))), "lost": tuple(map(bool, lost))})


@dataclass
class Stage:
    """A node around the tests. What it does takes the time that it says."""

    answer: str | Exception = field(default_factory=lambda: printed(GPU, GPU))
    devices_s: float = 0.5
    stuck: bool = False  # the process that tests the devices cannot be killed
    disk_s: float = 0.01
    disk: Check = field(default_factory=lambda: Check("disk", True, "9 GB free"))
    ports_now: NicSample | None = None
    reported: list[Preflight] = field(default_factory=list)
    cancelled: int = 0
    ports: ActivePorts = field(init=False)

    def __post_init__(self) -> None:
        self.ports = ActivePorts(self.read_ports)

    async def test_devices(self, within_s: float, timeout_s: float) -> str:
        assert within_s < timeout_s
        try:
            await anyio.sleep(self.devices_s)
        except anyio.get_cancelled_exc_class():
            self.cancelled += 1
            if self.stuck:
                with anyio.CancelScope(shield=True):
                    await anyio.sleep(3600)
            raise
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def read_ports(self) -> NicSample:
        if self.ports_now is None:
            raise OSError(5, "Input/output error")
        return self.ports_now

    async def test_disk(self) -> Check:
        await anyio.sleep(self.disk_s)
        return self.disk


@asynccontextmanager
async def stage(**options: Any) -> AsyncIterator[tuple[Stage, SuspectTests]]:
    played = Stage(**options)
    async with anyio.create_task_group() as tasks:
        yield (
            played,
            SuspectTests(
                tasks,
                test_devices=played.test_devices,
                test_disk=played.test_disk,
                test_ports=played.ports.check,
                gpus_are_real=True,
                failed=played.reported.append,
            ),
        )
        tasks.cancel_scope.cancel()


def verdicts(tested: Preflight) -> dict[str, bool | None]:
    return {check.name: check.ok for check in tested.checks}


async def test_a_healthy_node_passes() -> None:
    async with stage(ports_now=ports("ACTIVE")) as (played, tests):
        tests.watch(gpus(0, 0))
        played.ports.watch(ports("ACTIVE"))
        tested = await tests.make(2.0)
    assert verdicts(tested) == dict.fromkeys(("gpus", "products", "memory", "links", "disk", "ports"), True)
    assert played.reported == []


@pytest.mark.parametrize(
    ("answer", "failing"),
    [
        (printed(WRONG, GPU), "products"),
        (printed({**WRONG, **LATE}, GPU), "products"),  # found before its time was over
        (printed({"error": "CUDA error: uncorrectable ECC error"}, GPU), "devices"),
        (printed({**GPU, "memory_gb_s": 100.0}, GPU), "memory"),
        (printed(GPU, GPU, wrong=17), "links"),
    ],
)
async def test_what_fails(answer: str, failing: str) -> None:
    async with stage(answer=answer) as (played, tests):
        tested = await tests.make(2.0)
    assert verdicts(tested)[failing] is False
    assert played.reported == [tested]


@pytest.mark.parametrize(
    "answer",
    [
        printed(GPU, LATE, unfinished="its time was over"),
        printed(GPU, GPU, unfinished="NCCL error: unhandled system error"),
        printed({"unfinished": "CUDA out of memory"}, GPU),
        Unavailable("__main__.py was killed (time limit 2 s): no output"),
        "no JSON",
        ValueError("a bug of the test"),
    ],
)
async def test_what_was_not_concluded_is_no_failure(answer: str | Exception) -> None:
    async with stage(answer=answer) as (played, tests):
        tested = await tests.make(2.0)
    assert tested.failures == ""
    assert None in verdicts(tested).values()
    assert played.reported == []


@pytest.mark.parametrize("stuck", [False, True])
async def test_nothing_waits_longer_than_the_budget(stuck: bool) -> None:
    async with stage(devices_s=60.0, disk_s=60.0, stuck=stuck) as (played, tests):
        began = anyio.current_time()
        tested = await tests.make(2.0)
        assert anyio.current_time() - began == pytest.approx(2.0)
        await anyio.lowlevel.checkpoint()
        assert played.cancelled == 1, "its process is killed"
    assert verdicts(tested) == {"products": None, "disk": None}
    assert tested.checks[-1].detail == "not concluded within 2 s"


async def test_a_failure_ends_the_other_tests() -> None:
    async with stage(devices_s=60.0, disk=Check("disk", False, "/data: Input/output error")) as (_, tests):
        began = anyio.current_time()
        tested = await tests.make(2.0)
        assert anyio.current_time() - began == pytest.approx(0.01)
    assert verdicts(tested) == {"disk": False}


async def test_an_order_that_is_overtaken_ends_the_tests() -> None:
    async with stage(devices_s=60.0) as (played, tests):
        with anyio.move_on_after(0.5):
            await tests.make(2.0)
        await anyio.lowlevel.checkpoint()
        assert played.cancelled == 1


async def test_a_port_that_was_active_and_is_not_has_failed_and_one_that_never_was_has_not() -> None:
    async with stage(ports_now=ports("DOWN", "DOWN")) as (played, tests):
        played.ports.watch(ports("ACTIVE", "DOWN"))
        played.ports.watch(ports("DOWN", "DOWN"))
        assert (await tests.make(2.0)).failures == "ports: mlx5_0 port 1 was active, and is DOWN (Polling)"
        played.ports_now = ports("ACTIVE", "DOWN")
        assert verdicts(await tests.make(2.0))["ports"] is True
        played.ports_now = ports()
        assert (
            await tests.make(2.0)
        ).failures == "ports: mlx5_0 port 1 was active, and is gone (its device does not exist)"
        played.ports_now = None
        assert verdicts(await tests.make(2.0))["ports"] is None, "it cannot be read"
    async with stage(ports_now=ports("DOWN")) as (played, tests):
        played.ports.watch(ports("DOWN"))
        assert "ports" not in verdicts(await tests.make(2.0))


async def test_gpus_that_are_lost_or_that_torch_cannot_use() -> None:
    async with stage() as (_, tests):
        tests.watch(gpus(0, 1))
        assert (await tests.make(2.0)).failures == "gpus: GPU 1 is lost"
    cpu = printed({**GPU, "device": "cpu"}, wants_gpus=True)
    async with stage(answer=cpu) as (_, tests):
        assert (await tests.make(2.0)).failures == "", "NVML sees none"
        tests.watch(gpus(0, 0))
        assert (await tests.make(2.0)).failures == "devices: torch can use none of the 2 GPUs that NVML sees"
    async with stage(answer=cpu.replace("true", "false")) as (_, tests):
        tests.watch(gpus(0, 0))
        assert (await tests.make(2.0)).failures == "", "this torch uses none"


async def test_a_sample_in_use_is_what_the_driver_said_last() -> None:
    async with stage() as (_, tests):
        tests.watch(gpus(1))
        tests.watch(replace(gpus(0), at=2.0))
        assert (await tests.make(2.0)).failures == ""
