"""Lightning, Fabric, Accelerate, DCP, DeepSpeed, torchtitan and Megatron under the whole stack: a hung rank and a node that is
lost while a spare is free leave no trace in the weights. tests/frameworks/test_transformers.py does the same to Trainer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from training import cluster

from holdfast.cli.demo.course import examples

pytestmark = pytest.mark.frameworks

STEPS = 80
TIMEOUT_S = 600.0  # a bound: a minute on a machine that does nothing else


def weights(text: str) -> list[str]:
    return re.findall(r"weights ([0-9a-f]{16})", text)


def undisturbed(script: Path, directory: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script),
         "--steps", str(STEPS)],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return weights(done.stdout)


def job(script: Path, out: Path, *faults: str) -> dict[str, Any]:
    return {
        "name": "rough",
        "script": str(script),
        "args": ["--out", str(out), *(f"--fault={fault}" for fault in faults), "--steps", str(STEPS)],
        "nodes": 2,
        "nproc_per_node": 1,
        "mesh": {"dp": 2},
        "elastic": {"min_dp": 2, "max_dp": 2},
        "checkpoint": {"interval_steps": 5, "keep": 2},
        "env": {"OMP_NUM_THREADS": "1"},
    }


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("framework", "example", "needs"),
    [
        ("lightning", "lightning_autoencoder", "lightning"),
        ("accelerate", "accelerate_loop", "accelerate"),
        ("dcp", "dcp_fsdp", "torchdata"),
        ("deepspeed", "deepspeed_cifar", "deepspeed"),
        ("fabric", "fabric_language_model", "lightning"),
        ("torchtitan", "", "torchtitan"),  # a stand-in for its trainer, which needs a GPU
        ("megatron", "", "megatron"),  # Megatron-Core, with a stand-in for Megatron-Bridge, which needs a GPU
    ],
)
def test_a_hung_rank_and_a_lost_node_leave_no_trace(framework: str, example: str, needs: str, tmp_path: Path) -> None:
    if find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed: make frameworks-test")
    faulty, out = Path(__file__).with_name(f"faulty_{framework}.py"), tmp_path / "rough"
    expected = undisturbed(examples() / "frameworks" / f"{example}.py" if example else faulty, tmp_path)
    assert len(expected) == 1
    with cluster(tmp_path / "stack", nodes=3) as run:
        run.client.submit(job(faulty, out, "hang:0:27", "hang:1:45"))
        first = run.wait_resolved("rough", 1, TIMEOUT_S)
        run.wait("rough", "the second fault", lambda view: (out / "struck-45").exists(), TIMEOUT_S)
        lost = run.node_of("rough", 1)  # its rank stands still: nothing outruns the loss
        saved = run.saved_step("rough", without=lost)
        run.inject.node_loss(lost)
        incidents = run.wait_resolved("rough", 2, TIMEOUT_S)
        assert run.wait_end("rough", TIMEOUT_S)["phase"] == "completed"
    assert (first[0]["kind"], first[0]["rank"]) == ("hang", 0)
    assert [incident["action"]["kind"] for incident in incidents] == ["restart", "hot_swap"]
    assert incidents[1]["restored_step"] >= saved >= 1
    logs = (tmp_path / "stack" / "nodes").glob("*/logs/rough/g*/rank-0.log")
    assert weights("".join(log.read_text() for log in logs)) == expected
