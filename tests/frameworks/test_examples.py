"""The examples of frameworks under `holdfast run`: a killed rank costs a few steps, and leaves no trace in the weights."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from leftovers import MARK, marked, memory_of
from waiting import wait_until

from holdfast.cli.demo.course import examples

pytestmark = pytest.mark.frameworks
STEPS, KILL_AT = 150, 40
TIMEOUT_S = 600.0  # a bound: a minute on a machine that does nothing else


def workers(mark: str) -> list[psutil.Process]:
    """The forked workers: processes whose parent is a template, and whose grandparent is an agent."""
    templates = {process.pid for process in marked(mark) if "holdfast.train.warm.template" in process.cmdline()}
    return [process for process in marked(mark) if process.ppid() in templates]


def weights(text: str) -> str:
    found = re.findall(r"weights ([0-9a-f]{16})", text)
    assert found, text
    return str(found[-1])


def undisturbed(script: Path, directory: Path, *arguments: str) -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    done = subprocess.run(
        [*torchrun, str(script), "--steps", str(STEPS), *arguments],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return weights(done.stdout)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("lightning_autoencoder", "lightning"),
        pytest.param("accelerate_loop", "accelerate", marks=pytest.mark.core),
        ("dcp_fsdp", "torchdata"),
        ("deepspeed_cifar", "deepspeed"),
        ("fabric_language_model", "lightning"),
        ("faulty_torchtitan", "torchtitan"),  # no example: a stand-in for its trainer, which needs a GPU
        ("faulty_megatron", "megatron"),  # likewise, of Megatron-Bridge
        ("faulty_megatron --tp 2", "megatron"),
    ],
)
def test_a_killed_rank_leaves_no_trace_in_the_weights(name: str, needs: str, tmp_path: Path) -> None:
    if find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed: make frameworks-test")
    name, *arguments = name.split()
    script = (Path(__file__).parent if name.startswith("faulty") else examples() / "frameworks") / f"{name}.py"
    expected = undisturbed(script, tmp_path, *arguments)
    axis = "tp" if arguments else "dp"
    mark = f"{os.getpid()}-{random.random()}"
    job = tmp_path / "job.yaml"
    job.write_text(
        f"name: {name.replace('_', '-')}\nscript: {script}\nargs: {[*arguments, '--steps', str(STEPS), '--step-s', '0.05']}\n"
        f"nodes: 1\nnproc_per_node: 2\nmesh: {{{axis}: 2}}\ncheckpoint: {{interval_steps: 5}}\n"
        "env: {OMP_NUM_THREADS: '1'}\n"
    )
    output = tmp_path / "output.log"
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.cli.main", "run", "--local", str(job)],
            env={**os.environ, MARK: mark, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)},
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
        if process.poll() is None:
            process.terminate()  # ends the local stack as well
        process.wait(TIMEOUT_S)
    text = output.read_text()
    assert "SIGKILL" in text
    assert weights(text) == expected, text
    steps = [int(step) for step in re.findall(r"step (\d+)  loss", text)]
    early = [step for step in steps if step <= KILL_AT - 20]
    assert early, text
    assert len(early) == len(set(early)), f"from a checkpoint shortly before the kill, not from the start: {text}"
    wait_until(lambda: not marked(mark), description="every process of the run to be gone")
    assert memory_of(process.pid) == []
