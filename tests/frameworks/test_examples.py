"""The examples of frameworks under `holdfast run`: a killed rank costs a few steps, and leaves no trace in the weights."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from leftovers import MARK, marked, memory_of
from waiting import wait_until

from holdfast.cli.demo.scenario import examples

pytestmark = pytest.mark.frameworks
STEPS, KILL_AT = 150, 40
TIMEOUT_S = 240.0


def workers(mark: str) -> list[psutil.Process]:
    """The forked workers: processes whose parent is a template, and whose grandparent is an agent."""
    templates = {process.pid for process in marked(mark) if "holdfast.train.template" in process.cmdline()}
    return [process for process in marked(mark) if process.ppid() in templates]


def weights(text: str) -> str:
    found = re.findall(r"^(?:\[.*\] |\S+ \| )?.*weights ([0-9a-f]{16})", text, re.MULTILINE)
    assert found, text
    return str(found[-1])


def undisturbed(script: Path, directory: Path) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    done = subprocess.run(
        [*torchrun, str(script), "--steps", str(STEPS)],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return weights(done.stdout)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["lightning_autoencoder", "accelerate_loop", "dcp_fsdp"])
def test_a_killed_rank_leaves_no_trace_in_the_weights(name: str, tmp_path: Path) -> None:
    script = examples() / "frameworks" / f"{name}.py"
    expected = undisturbed(script, tmp_path)
    mark = f"{os.getpid()}-{random.random()}"
    arguments = [str(script), "--steps", str(STEPS), "--step-s", "0.05"]
    output = tmp_path / "output.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli.main", "run", "--local", "--nproc-per-node", "2", *arguments],
            env={**os.environ, MARK: mark, "TMPDIR": str(tmp_path), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(
            lambda: f"step {KILL_AT} " in output.read_text() or process.poll() is not None,
            description=f"step {KILL_AT}",
            timeout_s=TIMEOUT_S,
        )
        assert process.poll() is None, output.read_text()
        before = workers(mark)
        assert len(before) == 2
        before[-1].send_signal(signal.SIGKILL)
        assert process.wait(TIMEOUT_S) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    text = output.read_text()
    assert "SIGKILL" in text
    assert weights(text) == expected, text
    steps = [int(step) for step in re.findall(r"step (\d+)  loss", text)]
    assert steps.count(steps[0]) == 1, f"from a checkpoint, not from the start: {text}"
    wait_until(lambda: not marked(mark), description="every process of the run to be gone")
    assert memory_of(process.pid) == []
