"""When a GPU is reset, which others are reset with it, and what is refused. The command is a real process."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest
from pydantic import ValidationError
from resets import StandInGpus

from holdfast.agent.collectors.kernel_log import gpu_of
from holdfast.agent.collectors.protocol import Pausable
from holdfast.agent.gpus.gpu_devices import GpuDevices, Holder
from holdfast.agent.gpus.gpu_reset import GpuResets, ResetRules
from holdfast.agent.settings import AgentSettings
from holdfast.domain.errors import Conflict, HoldfastError, Unavailable
from holdfast.domain.nodes import RunningWorker
from holdfast.domain.orders import ResetGpu
from holdfast.domain.signals import GpuHealth, GpuSample

pytestmark = pytest.mark.anyio

TEST = "test"


def sample(*actions: int) -> GpuSample:
    count = len(actions)
    return GpuSample(
        "n", 1.0, tuple(range(count)), ("",) * count, (0.0,) * count, (0.0,) * count, (0,) * count, (0,) * count,
        actions, (False,) * count,
    )  # fmt: skip


def health(*links_up: int) -> GpuHealth:
    count = len(links_up)
    zeros, ones = (0,) * count, (1,) * count
    return GpuHealth(
        "n", 1.0, count, tuple(range(count)), ("",) * count, zeros, zeros, zeros, zeros, zeros, links_up,
        tuple(0 if up >= 0 else -1 for up in links_up), zeros, zeros, ones, ones, ones, ones, zeros, zeros, zeros,
        (math.inf,) * count, zeros, zeros, zeros,
    )  # fmt: skip


@dataclass
class Bench:
    """An agent around `GpuResets` that the test plays."""

    gpus: StandInGpus
    resets: GpuResets = field(init=False)
    together: str = "one"
    stops: tuple[str, ...] = ()
    workers: list[RunningWorker] = field(default_factory=list)
    failures: str = ""
    done: list[str] = field(default_factory=list)
    free_within_s: float = 0.5

    def __post_init__(self) -> None:
        self.resets = GpuResets(
            ResetRules(self.gpus.command, self.together, self.stops),
            devices=GpuDevices(self.gpus.devices),
            workers=lambda: self.workers,
            quiet=self.quiet,
            held=self.held,
            test=self.test,
            free_within_s=self.free_within_s,
        )

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        self.done.append("readers stopped")
        yield
        self.done.append("readers go on")

    @contextmanager
    def held(self) -> Iterator[None]:
        self.done.append("no tests")
        yield
        self.done.append("tests again")

    async def test(self) -> str:
        self.done.append(f"{TEST} after {len(self.gpus.resets)} resets")
        return self.failures

    async def refused(self, *gpus: int, timeout_s: float = 20.0) -> HoldfastError:
        with pytest.raises(HoldfastError) as raised:
            await self.resets.carry_out(ResetGpu("gpt", gpus, timeout_s))
        return raised.value


@pytest.fixture
def gpus(tmp_path: Path) -> StandInGpus:
    return StandInGpus.make(tmp_path / "node", 4)


async def test_readers_let_go_then_the_command_then_the_tests(gpus: StandInGpus) -> None:
    bench = Bench(gpus)
    outcome = await bench.resets.carry_out(ResetGpu("gpt", (2,), 20.0))
    assert gpus.resets == ["2"]
    assert bench.done == ["no tests", "readers stopped", "readers go on", f"{TEST} after 1 resets", "tests again"]
    assert outcome.reason == "GPU 2 was successfully reset. All done."
    assert [name for name, _ in outcome.phases_s] == ["gpu_reset", "self_test"]
    assert all(seconds >= 0 for _, seconds in outcome.phases_s)


async def test_workers_are_named_and_keep_their_gpu(gpus: StandInGpus) -> None:
    bench = Bench(gpus, workers=[RunningWorker("gpt", 3, 5, 4711)])
    assert "rank 5 of gpt (pid 4711)" in str(await bench.refused(2))
    assert gpus.resets == []


async def test_a_process_that_has_the_device_open_is_named(gpus: StandInGpus) -> None:
    bench = Bench(gpus)
    with (gpus.devices / "nvidia2").open():
        error = await bench.refused(2)
    assert isinstance(error, Conflict)
    assert f"pid {os.getpid()} (" in str(error)
    assert "has GPU 2 open" in str(error)
    assert gpus.resets == []
    await bench.resets.carry_out(ResetGpu("gpt", (2,), 20.0))
    assert gpus.resets == ["2"]


async def test_another_gpus_device_may_be_open(gpus: StandInGpus) -> None:
    with (gpus.devices / "nvidia1").open():
        await Bench(gpus).resets.carry_out(ResetGpu("gpt", (2,), 20.0))
    assert gpus.resets == ["2"]


async def test_a_process_that_is_ending_is_waited_for(gpus: StandInGpus) -> None:
    device = (gpus.devices / "nvidia2").open()

    async def end() -> None:
        await anyio.sleep(0.1)
        device.close()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(end)
        await Bench(gpus, free_within_s=30.0).resets.carry_out(ResetGpu("gpt", (2,), 20.0))
    assert gpus.resets == ["2"]


async def test_programs_that_the_command_stops_are_not_waited_for(gpus: StandInGpus) -> None:
    with (gpus.devices / "nvidia2").open():
        [holder] = GpuDevices(gpus.devices).holders([2])
        name = holder.name
        error = await Bench(gpus, stops=(name,)).refused(2)
    assert "currently in use by another process" in str(error)  # the command's own refusal: it did not stop the program


async def test_a_command_that_fails_says_why(gpus: StandInGpus) -> None:
    gpus.behave("fails")
    error = await Bench(gpus).refused(2)
    assert isinstance(error, Unavailable)
    assert "ended with exit code 255: Unable to reset GPU 2: Unknown Error" in str(error)


async def test_a_command_that_hangs_is_killed_at_the_limit(gpus: StandInGpus) -> None:
    gpus.behave("hangs")
    with anyio.fail_after(10):
        error = await Bench(gpus).refused(2, timeout_s=0.5)
    assert "did not end within 0.5 s and was killed" in str(error)


async def test_a_failing_test_makes_the_order_fail(gpus: StandInGpus) -> None:
    error = await Bench(gpus, failures="gpus: GPU 2 is lost").refused(2)
    assert "GPU 2 was reset, but the node's pre-flight test failed afterwards: gpus: GPU 2 is lost" in str(error)
    assert gpus.resets == ["2"]


@pytest.mark.parametrize(
    ("together", "links", "actions", "asked", "reset"),
    [
        ("one", (18, 18), (0, 0), (1,), (1,)),
        ("all", (-1, -1), (0, 0), (1,), (0, 1)),
        ("auto", (18, 18), (0, 0), (1,), (0, 1)),
        ("auto", (0, 0), (0, 0), (1,), (1,)),
        ("auto", (-1, -1), (0, 0), (1,), (0, 1)),  # not known
        ("auto", None, (0, 0), (1,), (0, 1)),  # nothing was read
        ("one", (0, 0, 0), (1, 0, 2), (1,), (0, 1)),  # the driver asks for a reset of 0; 2 needs a reboot
        ("one", (0, 0), (0, 0), (), (0, 1)),  # which one is not known
    ],
)
async def test_what_is_reset_together(
    gpus: StandInGpus, together: str, links: tuple[int, ...] | None, actions: tuple[int, ...], asked: tuple[int, ...],
    reset: tuple[int, ...],
) -> None:  # fmt: skip
    bench = Bench(gpus, together)
    bench.resets.watch(sample(*actions))
    if links is not None:
        bench.resets.watch(health(*links))
    assert bench.resets.together(asked) == reset


async def test_without_nvml_the_device_files_say_which_gpus_there_are(gpus: StandInGpus) -> None:
    assert Bench(gpus, "all").resets.together((1,)) == (0, 1, 2, 3)


def fake_process(proc: Path, pid: int, *targets: str) -> None:
    (proc / str(pid) / "fd").mkdir(parents=True)
    for number, target in enumerate(targets):
        (proc / str(pid) / "fd" / str(number)).symlink_to(target)
    (proc / str(pid) / "comm").write_text("python\n")
    (proc / str(pid) / "cmdline").write_text("python\0train.py\0")


async def test_a_gpu_and_its_device_file_may_have_different_numbers(tmp_path: Path) -> None:
    for address, minor in (("0000:3b:00.0", 1), ("0000:5e:00.0", 0)):
        information = tmp_path / "driver/nvidia/gpus" / address / "information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Model: \t\t NVIDIA H100\nDevice Minor: \t {minor}\n")
    fake_process(tmp_path, 7, "/dev/null", "/dev/nvidia1", "/dev/nvidiactl")
    fake_process(tmp_path, 8, "/dev/nvidia-uvm", "/dev/nvidia0 (deleted)")
    devices = GpuDevices(proc=tmp_path)
    assert devices.minors() == {0: 1, 1: 0}
    found = [gpu_of(address, tmp_path / "driver/nvidia/gpus") for address in ("0000:3B:00", "0000:5e:00.0")]
    assert found == [0, 1], "a kernel line and NVML mean the same GPU by a number"
    assert devices.holders([0]) == [Holder(7, "python train.py", "python", 0)]
    assert [holder.pid for holder in devices.holders([0, 1])] == [7, 8]
    assert devices.holders([0, 1], except_for=("python",)) == []


async def test_a_paused_loop_is_left_and_begins_anew() -> None:
    begun, living = 0, 0

    async def loop() -> None:
        nonlocal begun, living
        begun, living = begun + 1, living + 1
        try:
            await anyio.sleep_forever()
        finally:
            living -= 1

    pausable = Pausable(loop)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pausable.run)
        await anyio.lowlevel.checkpoint()
        for _ in range(2):
            async with pausable.paused():
                assert living == 0
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            assert living == 1
        tasks.cancel_scope.cancel()
    assert begun == 3


def settings(**values: str) -> AgentSettings:
    directories = {"agent_dir": "/run/hf", "memory_dir": "/dev/shm/hf", "disk_dir": "/hf"}
    return AgentSettings.model_validate({"supervisor": "host:1", **directories, **values})


async def test_the_settings_say_whether_resets_are_possible(gpus: StandInGpus) -> None:
    assert settings(gpu_reset_command=gpus.command).resets.possible
    assert not settings(gpu_reset_command="none").resets.possible
    assert not settings(gpu_reset_command="/no/such/program {gpu}").resets.possible
    rules = settings(gpu_reset_stops="dcgm, nvidia-persiste").resets
    assert rules.words((0, 3)) == ["nvidia-smi", "--gpu-reset", "-i", "0,3"]
    assert rules.stops == ("dcgm", "nvidia-persiste")
    with pytest.raises(ValidationError, match=r"contains \{gpu\}"):
        settings(gpu_reset_command="nvidia-smi --gpu-reset")


async def test_what_an_agent_must_not_do_can_be_said_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable counts as one that is not set."""
    for name, value in {
        "SUPERVISOR": "host:1",
        "AGENT_DIR": "/run/hf",
        "MEMORY_DIR": "/dev/shm/hf",
        "DISK_DIR": "/hf",
        "GPU_RESET_COMMAND": "none",
        "MAINTENANCE_URL": "none",
    }.items():
        monkeypatch.setenv(f"HOLDFAST_{name}", value)
    made = AgentSettings.model_validate({})
    assert (made.gpu_reset_command, made.maintenance_url) == ("", "")
    monkeypatch.setenv("HOLDFAST_GPU_RESET_COMMAND", "")
    assert "{gpu}" in AgentSettings.model_validate({}).gpu_reset_command
