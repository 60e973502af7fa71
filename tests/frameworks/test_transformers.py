"""Trainer under the whole stack and under torchrun: killed while it accumulates gradients, hung, swapped to another node, it
ends with the weights and the logged losses of an undisturbed torchrun run, bit for bit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from training import cluster

from holdfast.cli.demo.course import examples

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed: make frameworks-test"),
]

EXAMPLE = examples() / "frameworks" / "hf_trainer.py"
FAULTY = Path(__file__).parent / "faulty_hf.py"
STEPS = 80
TIMEOUT_S = 600.0  # a bound: a minute on a machine that does nothing else
LOGGED = ("loss", "eval_loss", "grad_norm", "learning_rate", "train_loss", "epoch")


def start(command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def torchrun(script: Path, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return start(
        ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script), "--steps", str(STEPS), *args],
        **environ,
    )


def outcome(out: Path) -> tuple[str, list[dict[str, float]]]:
    """The hash of the weights, and what Trainer has logged, but for times."""
    state = json.loads((out / "trainer_state.json").read_text())
    assert state["global_step"] == STEPS
    logged = [{name: entry[name] for name in LOGGED if name in entry} for entry in state["log_history"]]
    return (out / "weights.sha256").read_text(), logged


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, float]]]:
    out = tmp_path_factory.mktemp("calm")
    done = torchrun(EXAMPLE, "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    return outcome(out)


def job(out: Path, *faults: str) -> dict[str, Any]:
    return {
        "name": "trainer",
        "script": str(FAULTY),
        "args": ["--steps", str(STEPS), "--out", str(out), *(f"--fault={fault}" for fault in faults)],
        "nodes": 2,
        "nproc_per_node": 1,
        "mesh": {"dp": 2},
        "elastic": {"min_dp": 2, "max_dp": 2},
        "checkpoint": {"interval_steps": 5, "keep": 2},
        "preload": ["transformers.trainer"],
        "env": {"OMP_NUM_THREADS": "1"},
    }


@pytest.mark.timeout(1800)
def test_kills_and_hangs_within_an_accumulation_and_a_lost_node_leave_no_trace(
    tmp_path: Path, undisturbed: tuple[str, list[dict[str, float]]]
) -> None:
    out = tmp_path / "rough"
    faults = ("kill:1:13", "hang:0:27", "hang:1:45")
    with cluster(tmp_path / "stack", nodes=3) as run:
        run.client.submit(job(out, *faults))
        run.wait_resolved("trainer", 2, TIMEOUT_S)
        run.wait("trainer", "the third fault", lambda view: (out / "struck-45").exists(), TIMEOUT_S)
        lost = run.node_of("trainer", 1)  # its rank stands still: nothing outruns the loss
        saved = run.saved_step("trainer", without=lost)
        run.inject.node_loss(lost)
        incidents = run.wait_resolved("trainer", 3, TIMEOUT_S)
        assert run.wait_end("trainer", TIMEOUT_S)["phase"] == "completed"
    assert [incident["action"]["kind"] for incident in incidents] == ["restart", "restart", "hot_swap"]
    assert [incident["kind"] for incident in incidents[:2]] == ["worker_crash", "hang"]
    assert incidents[2]["restored_step"] >= saved
    assert outcome(out) == undisturbed


@pytest.mark.core
@pytest.mark.timeout(1800)
def test_holdfast_run_takes_the_script_as_torchrun_does(
    tmp_path: Path, undisturbed: tuple[str, list[dict[str, float]]]
) -> None:
    out = tmp_path / "rough"
    command = ["holdfast.cli.main", "run", "--local", "--nproc-per-node", "2", str(FAULTY), "--steps", str(STEPS)]
    done = start([*command, "--out", str(out), "--fault", "kill:1:40"], TMPDIR=str(tmp_path), HOME=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SIGKILL" in done.stdout
    assert outcome(out) == undisturbed


@pytest.mark.timeout(1800)
def test_torchrun_alone_goes_on_from_a_checkpoint_directory(
    tmp_path: Path, undisturbed: tuple[str, list[dict[str, float]]]
) -> None:
    out, directory = tmp_path / "rough", tmp_path / "ckpt"
    environ = {"HOLDFAST_CHECKPOINT_DIR": str(directory), "HOLDFAST_CHECKPOINT_INTERVAL_STEPS": "5"}
    try:
        killed = torchrun(FAULTY, "--out", str(out), "--fault", "kill:1:33", **environ)
        assert killed.returncode != 0
        assert re.search(r"exitcode\s+: -9", killed.stderr), killed.stderr
        again = torchrun(FAULTY, "--out", str(out), **environ)
        assert again.returncode == 0, again.stdout + again.stderr
    finally:
        for record in directory.glob("run.json"):  # the images that the killed run has left
            run = json.loads(record.read_text())["run"]
            shutil.rmtree(Path("/dev/shm", f"holdfast-{os.getuid()}", run), ignore_errors=True)
    assert outcome(out) == undisturbed
