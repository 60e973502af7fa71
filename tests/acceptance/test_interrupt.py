"""Ctrl-C at any moment leaves no process, no shared-memory file and no Redis behind."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from leftovers import MARK, marked, memory_of
from waiting import TIMEOUT_S, wait_until

from holdfast.cli.demo.course import examples

# What Python says that is interrupted before it has begun with our command: on a busy machine it has not after 0.3 s.
PYTHON_STARTS = (b"Fatal Python error: init_", b"Could not import runpy")
TRAINS = re.compile(rb"running .* step [1-9]")


@pytest.mark.parametrize("moment_s", [0.3, 1.5, 4.0, None], ids=lambda moment_s: str(moment_s or "training"))
def test_interrupting_a_local_run_leaves_nothing_behind(tmp_path: Path, moment_s: float | None) -> None:
    mark = f"{os.getpid()}-{moment_s}-{random.random()}"
    output = tmp_path / "output"
    script = examples() / "gpt" / "train.py"
    command = ["run", "--local", "--nnodes", "1", "--nproc-per-node", "2", str(script), "--steps", "100000"]
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli.main", *command],
            env={**os.environ, MARK: mark, "TMPDIR": str(tmp_path), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    if moment_s is None:
        wait_until(lambda: TRAINS.search(output.read_bytes()), description="a step of training")
    else:
        time.sleep(moment_s)  # the moment is the parameter of this test, not a wait for something
    process.send_signal(signal.SIGINT)
    # 130 to a shell, either way: Python itself answers while it still imports us, and with 1 before it knows what to import
    status = process.wait(TIMEOUT_S)
    ended = (1,) if output.read_bytes().startswith(PYTHON_STARTS) else (130, -signal.SIGINT)
    assert status in ended, output.read_text()
    wait_until(lambda: not marked(mark), description="every process of the run to be gone")
    assert memory_of(process.pid) == []
