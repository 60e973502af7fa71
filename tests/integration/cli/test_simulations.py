"""`holdfast simulate` with several processes: it ends when one of them is ended from outside, and leaves none behind."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from commands import Shell
from waiting import TIMEOUT_S, wait_until

SEEDS = 100_000  # hours of work


def in_a_task(process: psutil.Process) -> bool:
    """It computes: longer than its start takes, which shares its imports with the command."""
    times = process.cpu_times()
    return bool(times.user + times.system > 1.0)


@contextmanager
def simulation(shell: Shell) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """The command, and the processes in which it simulates."""
    with shell.start("simulate", "--all-worlds", "--seeds", str(SEEDS), "--jobs", "2") as command:
        processes: list[psutil.Process] = []

        def both_compute() -> bool:
            processes[:] = psutil.Process(command.pid).children()
            return len(processes) == 2 and all(map(in_a_task, processes))

        wait_until(both_compute, description="both processes to simulate")
        yield command, processes
    shell.assert_nothing_runs()


# By SIGKILL as by the kernel when the memory is full: the pool ends the others by SIGTERM.
@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_the_end_of_one_process_ends_the_command_with_an_error(tmp_path: Path, ended_by: signal.Signals) -> None:
    with simulation(Shell(tmp_path)) as (command, processes):
        processes[0].send_signal(ended_by)
        _, err = command.communicate(timeout=TIMEOUT_S)
    assert command.returncode == 2, err
    assert "a process of the simulation was ended from outside" in err
    assert "Traceback" not in err, err


def test_a_killed_command_leaves_no_process(tmp_path: Path) -> None:
    with simulation(Shell(tmp_path)) as (command, _):
        command.kill()
