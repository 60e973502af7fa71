"""Jobs on a GPU through the whole loop: killed, out of memory, an assertion on the device, a wild address, an endless kernel.

A run that was broken ends with the losses and sums of one that was not, bit for bit."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training import Cluster, cluster
from waiting import wait_until

pytestmark = pytest.mark.timeout(240)

SCRIPT = Path(__file__).with_name("train_gpu.py")
STEPS = 400
NO_RESETS = {"HOLDFAST_GPU_RESET_COMMAND": "none"}


def gpu_job(name: str, out: Path, *arguments: str, dp: int = 1, steps: int = STEPS) -> dict[str, Any]:
    return {
        "name": name,
        "script": str(SCRIPT),
        "args": ["--steps", str(steps), "--out", str(out), *arguments],
        "nodes": dp,
        "nproc_per_node": 1,
        "env": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        "mesh": {"dp": dp},
        "checkpoint": {"interval_steps": 5, "keep": 2},
        "hang": {"floor_s": 5.0},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("stack"), nodes=3, environment=NO_RESETS) as run:
        yield run


@pytest.fixture(scope="module")
def calm(run: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One rank, NCCL, undisturbed."""
    out = tmp_path_factory.mktemp("calm")
    run.client.submit(gpu_job("calm", out))
    completed(run, "calm")
    return out


def completed(run: Cluster, name: str) -> None:
    end = run.wait_end(name, timeout_s=90.0)
    assert end["phase"] == "completed", end["reason"]


def losses(out: Path, rank: int = 0) -> dict[int, float]:
    lines = [json.loads(line) for line in (out / f"losses-{rank}.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def tell(incidents: list[dict[str, Any]], out: Path, rank: int = 0) -> None:
    """Print what happened, and the time from the last step before the fault to the first after it."""
    lines = [json.loads(line) for line in (out / f"losses-{rank}.jsonl").read_text().splitlines()]
    gaps = [
        (before["step"], after["step"], round(after["at"] - before["at"], 3))
        for before, after in itertools.pairwise(lines)
        if before["generation"] != after["generation"]
    ]
    for incident in incidents:
        print(json.dumps({key: incident.get(key) for key in (
            "kind", "cause", "title", "summary", "node", "rank", "action", "phases_s", "restored_step", "evidence")},
            default=str)[:3000])  # fmt: skip
    print("gaps", gaps)


def same_end(one: Path, other: Path, rank: int = 0) -> None:
    assert losses(one, rank) == losses(other, rank)
    assert json.loads((one / f"end-{rank}.json").read_text()) == json.loads((other / f"end-{rank}.json").read_text())


def test_a_killed_rank_goes_on_bit_for_bit(run: Cluster, calm: Path, tmp_path: Path) -> None:
    run.client.submit(gpu_job("killed", tmp_path))
    for count, step in enumerate((30, 130), 1):
        run.wait_step("killed", step)
        [worker] = run.client.job("killed")["ranks"]
        os.kill(worker["pid"], signal.SIGKILL)
        incidents = run.wait_resolved("killed", count)
    completed(run, "killed")
    tell(incidents, tmp_path)
    assert incidents[0]["action"]["kind"] == "restart"
    same_end(calm, tmp_path)


@pytest.mark.parametrize("fault", ["oom", "assert", "address"])
def test_an_error_of_the_device(run: Cluster, calm: Path, tmp_path: Path, fault: str) -> None:
    run.client.submit(gpu_job(fault, tmp_path, "--fault", fault, "--fault-step", "40"))
    completed(run, fault)
    incidents = run.wait_resolved(fault, 1)
    tell(incidents, tmp_path)
    same_end(calm, tmp_path)


def test_a_kernel_that_never_ends(run: Cluster, calm: Path, tmp_path: Path) -> None:
    run.client.submit(gpu_job("endless", tmp_path, "--fault", "endless", "--fault-step", "40"))
    completed(run, "endless")
    incidents = run.wait_resolved("endless", 1)
    tell(incidents, tmp_path)
    same_end(calm, tmp_path)


def test_two_ranks_share_the_gpu_and_one_dies_with_its_node(run: Cluster, tmp_path: Path) -> None:
    """gloo, which reduces tensors of the device; NCCL refuses two ranks on one GPU."""
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    run.client.submit(gpu_job("two-calm", calm, "--backend", "gloo", dp=2, steps=150))
    completed(run, "two-calm")
    run.client.submit(gpu_job("two-rough", rough, "--backend", "gloo", dp=2, steps=150))
    run.wait_step("two-rough", 20)
    os.kill(run.client.job("two-rough")["ranks"][1]["pid"], signal.SIGKILL)
    run.wait_resolved("two-rough", 1)
    run.wait_step("two-rough", 60)
    lost = run.node_of("two-rough", 1)
    run.saved_step("two-rough", without=lost)
    run.inject.node_loss(lost)
    incidents = run.wait_resolved("two-rough", 2)
    completed(run, "two-rough")
    tell(incidents, rough)
    assert incidents[1]["action"]["kind"] == "hot_swap"
    for rank in (0, 1):
        same_end(calm, rough, rank)


def test_a_compiled_model_compiles_once(run: Cluster, tmp_path: Path) -> None:
    run.client.submit(gpu_job("compiled", tmp_path, "--compile"))
    run.wait_step("compiled", 60)
    [worker] = run.client.job("compiled")["ranks"]
    os.kill(worker["pid"], signal.SIGKILL)
    incidents = run.wait_resolved("compiled", 1)
    completed(run, "compiled")
    tell(incidents, tmp_path)
    wait_until(lambda: len(losses(tmp_path)) == STEPS, description="every step's loss")
