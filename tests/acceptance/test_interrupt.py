"""Ctrl-C at any moment leaves no process, no shared-memory file and no Redis behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from waiting import wait_until

from holdfast.cli.demo.scenario import examples

MEMORY = Path("/dev/shm")
MARK = "HF_TEST_MARK"  # HOLDFAST_… would not reach the services: the stack gives them its own


def marked(mark: str) -> list[psutil.Process]:
    """Every process that inherited our mark in its environment, wherever it is in the tree."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.timeout(180)
@pytest.mark.parametrize("moment_s", [0.3, 1.5, 4.0, 9.0])
def test_interrupting_a_local_run_leaves_nothing_behind(tmp_path: Path, moment_s: float) -> None:
    before = set(MEMORY.iterdir())
    mark = f"{os.getpid()}-{moment_s}-{random.random()}"
    script = examples() / "gpt" / "train.py"
    command = ["run", "--local", "--nnodes", "1", "--nproc-per-node", "2", str(script), "--steps", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "holdfast.cli.main", *command],
        env={**os.environ, MARK: mark, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    time.sleep(moment_s)  # the moment is the parameter of this test, not a wait for something
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output.decode()
    wait_until(lambda: not marked(mark), description="every process of the run to be gone", timeout_s=10)
    assert set(MEMORY.iterdir()) - before == set()
