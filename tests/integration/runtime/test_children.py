"""Children cannot outlive us, and their end is known at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from leftovers import gone
from waiting import TIMEOUT_S, quickest_async, wait_until, wait_until_async

from holdfast.domain.errors import NotFound
from holdfast.runtime.processes.children import Child, running, spawn, tied

pytestmark = pytest.mark.anyio

# Waits for a straggler in its own process group; the first line tells the straggler's pid.
PARENT_OF_ONE = "sleep 300 & echo $! > {file}; wait"


async def read_pid(path: Path) -> int:
    return int(await wait_until_async(lambda: path.exists() and path.read_text().strip(), description="a pid"))


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", -9)])
async def test_the_exit_code_comes_as_it_is(script: str, code: int) -> None:
    before = open_files()
    child = spawn("example", ["sh", "-c", script])
    with anyio.fail_after(TIMEOUT_S):
        assert await child.wait() == code
        assert await child.wait() == code
        assert await child.stop() == code
    assert child.returncode == code
    assert open_files() == before


async def test_every_waiter_is_notified() -> None:
    child = spawn("example", ["sleep", "300"])
    codes = []

    async def wait() -> None:
        codes.append(await child.wait())

    with anyio.fail_after(TIMEOUT_S):
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            os.kill(child.pid, signal.SIGKILL)
    assert codes == [-9, -9, -9]


async def test_an_exit_is_seen_within_milliseconds() -> None:
    async def seen_after(_: int) -> float:
        child = spawn("example", ["sleep", "300"])
        async with running(child):
            await anyio.lowlevel.checkpoint()
            started = time.monotonic()
            os.kill(child.pid, signal.SIGKILL)
            await child.wait()
            return time.monotonic() - started

    assert await quickest_async(seen_after, below_s=0.25) < 0.25  # about a millisecond when the machine is idle


async def test_what_the_child_started_goes_with_it(tmp_path: Path) -> None:
    child = spawn("example", ["sh", "-c", PARENT_OF_ONE.format(file=tmp_path / "pid")])
    straggler = await read_pid(tmp_path / "pid")
    os.kill(child.pid, signal.SIGKILL)
    with anyio.fail_after(TIMEOUT_S):
        await child.wait()
    wait_until(lambda: gone(straggler), description="the straggler's end")


async def test_a_child_that_ignores_the_polite_signal() -> None:
    child = spawn("example", [sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"])
    await ignoring_sigterm(child)
    with anyio.fail_after(TIMEOUT_S):
        assert await child.stop(grace_s=0.1) == -9


async def ignoring_sigterm(child: Child) -> None:
    mask = 1 << (signal.SIGTERM - 1)
    status = Path(f"/proc/{child.pid}/status")

    def ignores() -> bool:
        line = next(line for line in status.read_text().splitlines() if line.startswith("SigIgn"))
        return bool(int(line.split()[1], 16) & mask)

    await wait_until_async(ignores, description="SIGTERM to be ignored")


async def test_leaving_the_block_stops_it_also_when_cancelled() -> None:
    with anyio.move_on_after(0) as scope:
        async with running(spawn("example", ["sleep", "300"])) as child:
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert child.returncode == -signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_it_dies_with_us(tmp_path: Path, number: signal.Signals) -> None:
    source = (
        "import pathlib, signal\n"
        "from holdfast.runtime.processes.children import spawn\n"
        f"child = spawn('example', ['sleep', '300'])\npathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(child.pid))\n"
        "signal.pause()\n"
    )
    us = subprocess.Popen([sys.executable, "-c", source])  # noqa: ASYNC220 - must not be tied to us by spawn
    child = await read_pid(tmp_path / "pid")
    await wait_until_async(lambda: "sleep" in Path(f"/proc/{child}/cmdline").read_text(), description="exec")
    us.send_signal(number)
    us.wait(timeout=TIMEOUT_S)
    wait_until(lambda: gone(child), description="the child's end")


def test_a_parent_that_died_before_the_tie_is_noticed() -> None:
    command = tied(["sleep", "300"])
    command[command.index(str(os.getpid()))] = "1"  # as if we had died and init had taken the child
    assert subprocess.run(command, check=False, timeout=TIMEOUT_S).returncode == 137


async def test_only_the_main_thread_may() -> None:
    with pytest.raises(RuntimeError, match="start it from the main thread"):
        await anyio.to_thread.run_sync(lambda: spawn("example", ["sleep", "300"]))


async def test_a_program_that_does_not_exist() -> None:
    with pytest.raises(NotFound, match="cannot start the example: there is no program 'no-such-program'"):
        spawn("the example", ["no-such-program"])


async def test_output_and_descriptors_reach_the_child(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    with (tmp_path / "log").open("wb") as log:
        child = spawn(
            "example",
            ["sh", "-c", f"echo out; echo err >&2; echo hi >/dev/fd/{writing}"],
            output=log,
            pass_fds=[writing],
        )
        os.close(writing)
        with anyio.fail_after(TIMEOUT_S):
            assert await child.wait() == 0
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "hi\n"
    assert (tmp_path / "log").read_text() == "out\nerr\n"
