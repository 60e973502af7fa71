"""Jobs as allocations of a real Slurm: drained nodes, lost nodes, a time limit and what comes after it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import scaling_train
import yaml
from slurm_cluster import Slurm, missing, slurm
from waiting import wait_until

from holdfast.cli.client import Client

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())} (make slurm-test)"),
]

JOB = "llm"


@dataclass
class Run:
    """One job's directory on a cluster of three nodes."""

    root: Path
    cluster: Slurm

    def submit(self, *options: str, steps: int, step_s: float = 0.1) -> list[str]:
        """Submit the job: two nodes, a spare. Return the numbers of its allocations."""
        body = {
            "name": JOB,
            "script": scaling_train.__file__,
            "args": ["--steps", str(steps), "--out", str(self.root / "out"), "--step-s", str(step_s)],
            "nodes": 2,
            "mesh": {"dp": 2},
            "spares": 1,
            "checkpoint": {"interval_steps": 20, "store": f"file://{self.root}/store"},
        }
        (self.root / "job.yaml").write_text(yaml.safe_dump(body))
        command = [sys.executable, "-m", "holdfast.cli.main", "slurm", "submit", str(self.root / "job.yaml")]
        places = ["--dir", str(self.root / "shared"), "--local", str(self.root / "local")]
        said = self.cluster(*command, *places, *options)
        found = re.search(r"to Slurm: ([\d, ]+)", said)
        assert found is not None, said
        return found[1].split(", ")

    @property
    def steps(self) -> list[int]:
        path = self.root / "out" / "steps.jsonl"
        return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []

    def a_node_with_ranks(self) -> str:
        """Not the one that runs the batch script, whose loss ends the allocation."""
        shared = self.root / "shared"
        api, token = json.loads((shared / "control.json").read_text())["api"], (shared / "api-token").read_text()
        with Client(api, token=token) as client:
            nodes = [str(rank["node"]) for rank in client.job(JOB)["ranks"]]
        return next(node for node in nodes if node != self.cluster.nodes[0])

    def said(self, job: str) -> str:
        path = self.root / "shared" / f"slurm-{job}.out"
        return path.read_text() if path.exists() else "(no output)"

    def wait_step(self, step: int) -> None:
        wait_until(lambda: self.steps and self.steps[-1] >= step, description=f"step {step}", timeout_s=180)

    def wait_end(self, job: str, *states: str) -> None:
        try:
            self.cluster.wait_state(job, *states, timeout_s=240)
        except AssertionError as error:
            raise AssertionError(f"{error}; it said:\n{self.said(job)}") from error


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with slurm(tmp_path / "cluster", 3) as cluster:
        yield Run(tmp_path, cluster)


def test_a_drained_node_is_swapped_and_no_step_is_done_twice(run: Run) -> None:
    (job,) = run.submit("--time", "30", steps=200)
    run.wait_step(20)
    node = run.a_node_with_ranks()
    run.cluster("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=disk | to be replaced")
    run.wait_end(job, "COMPLETED")
    said = run.said(job)
    assert f"{node}: Slurm: draining (disk | to be replaced)" in said
    assert "hot_swap" in said
    assert run.steps == list(range(1, 201)), said
    assert run.cluster.field(job, "ExitCode") == "0:0"


def test_a_node_that_loses_its_power_is_replaced_by_the_spare(run: Run) -> None:
    (job,) = run.submit("--time", "30", steps=250)
    run.wait_step(25)
    run.cluster.power_off(run.a_node_with_ranks())
    run.wait_end(job, "COMPLETED")
    said = run.said(job)
    assert "hot_swap" in said
    assert run.steps[-1] == 250
    assert set(run.steps) == set(range(1, 251))


def test_at_its_time_limit_the_job_is_saved_and_the_next_allocation_goes_on(run: Run) -> None:
    first, second = run.submit("--time", "3", "--notice", "90", "--chain", "2", steps=1500)
    run.wait_step(25)
    run.wait_end(first, "FAILED", "COMPLETED", "TIMEOUT")
    said = run.said(first)
    assert run.cluster.field(first, "ExitCode") == "75:0", said
    assert "the job is saved and suspended" in said
    before = run.steps
    assert before == list(range(1, len(before) + 1)), said
    wait_until(lambda: len(run.steps) > len(before) + 20, description="the next allocation to go on", timeout_s=180)
    assert run.steps[len(before)] == before[-1] + 1, "no step twice, none left out"
    run.cluster("scancel", second)
