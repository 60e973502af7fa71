"""A process that outlives its starter is found again by its pid file, and by nothing else that has its number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import wait_until

from holdfast.runtime.processes.survivors import UNKNOWN_EXIT, Survivor, find, noted

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; print('up', flush=True); time.sleep(600)"]


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(noted(SLEEP, tmp_path / "pid"), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_it_is_found_and_can_be_ended(sleeper: subprocess.Popen[bytes], tmp_path: Path) -> None:
    survivor = find(tmp_path / "pid")
    assert survivor is not None
    assert survivor.pid == sleeper.pid
    assert survivor.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        survivor.wait(0.01)
    survivor.terminate()
    assert survivor.wait(10) == UNKNOWN_EXIT
    assert survivor.poll() == UNKNOWN_EXIT
    survivor.kill()
    assert sleeper.wait() == -signal.SIGTERM


def test_its_starter_may_be_killed(tmp_path: Path) -> None:
    starting = f"""
import subprocess, time
from pathlib import Path
from holdfast.runtime.processes.survivors import noted
subprocess.Popen(noted({SLEEP!r}, Path({str(tmp_path / "pid")!r})))
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", starting]) as starter:
        wait_until((tmp_path / "pid").exists, description="the pid file")
        starter.kill()
    survivor = find(tmp_path / "pid")
    assert survivor is not None
    survivor.kill()
    survivor.wait(10)


def test_a_number_that_means_another_process_by_now_is_not_found(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    pid, started, boot = (tmp_path / "pid").read_text().split()
    for text in (
        f"{os.getppid()} {started} {boot}",
        f"{pid} {int(started) - 1} {boot}",
        f"{pid} {started} {'0' * 36}",
        f"{pid} {started}",
        "",
        "x y z",
    ):
        (tmp_path / "other").write_text(text)
        assert find(tmp_path / "other") is None
    assert find(tmp_path / "none") is None


def test_one_that_has_ended_is_not_found_also_while_nobody_has_reaped_it(
    sleeper: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    watched = Survivor(sleeper.pid)
    sleeper.kill()
    watched.wait(10)  # a zombie now
    assert find(tmp_path / "pid") is None


def test_a_pid_file_that_cannot_be_written_does_not_keep_the_program_from_running(tmp_path: Path) -> None:
    command = noted([sys.executable, "-c", "print('runs')"], tmp_path / "no" / "such" / "directory")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "runs\n"
    assert "cannot be written" in done.stderr


def test_a_full_disk_keeps_no_program_from_starting(tmp_path: Path) -> None:
    """Its pid file cannot be written, and neither can the error: both are on the disk."""
    with open("/dev/full", "w") as full:
        program = [sys.executable, "-I", "-S", "-c", "raise SystemExit(7)"]
        done = subprocess.run(noted(program, tmp_path / "no directory" / "pid"), stderr=full, check=False)
    assert done.returncode == 7
