"""Jobs on a real Slurm, and what they must have computed."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import scaling_train
import yaml
from scaling_losses import records
from slurm_cluster import Slurm, missing, slurm
from waiting import wait_until

from holdfast.cli.client import Client

JOB = "llm"
INTERVAL_STEPS = 20
END_TIMEOUT_S = 240.0

MARKS = [
    pytest.mark.slurm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=f"not installed: {', '.join(missing())} (make slurm-test)"),
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons need root"),
]


@dataclass
class Run:
    """One job and its directory. `local`, `memory`: its own places on the machine's disk and tmpfs, which all clusters of this
    machine share. Their paths are short, as on the machines of a cluster: the agents make Unix sockets in them."""

    root: Path
    cluster: Slurm
    local: Path
    memory: Path
    job: str = JOB
    spec: dict[str, Any] = field(default_factory=dict)

    @property
    def shared(self) -> Path:
        return self.root / "shared"

    def write(self, steps: int, step_s: float = 0.1, **more: Any) -> Path:
        """Write the job file: two nodes, a spare."""
        self.spec = {
            "name": self.job,
            "script": scaling_train.__file__,
            "args": ["--steps", str(steps), "--out", str(self.root / "out"), "--step-s", str(step_s)],
            "nodes": 2,
            "mesh": {"dp": 2},
            "spares": 1,
            "checkpoint": {"interval_steps": INTERVAL_STEPS, "store": f"file://{self.root}/store"},
            **more,
        }
        path = self.root / "job.yaml"
        path.write_text(yaml.safe_dump(self.spec))
        return path

    def holdfast(self, *command: str) -> str:
        return self.cluster(sys.executable, "-m", "holdfast.cli.main", "slurm", *command)

    def places(self) -> list[str]:
        return ["--dir", str(self.shared), "--local", str(self.local), "--memory", str(self.memory)]

    def submit(self, *options: str, steps: int, step_s: float = 0.1, **more: Any) -> list[str]:
        """Submit the job. Return the numbers of its allocations."""
        said = self.holdfast("submit", str(self.write(steps, step_s, **more)), *self.places(), *options)
        found = re.search(r"to Slurm: ([\d, ]+)", said)
        assert found is not None, said
        return found[1].split(", ")

    @property
    def records(self) -> list[dict[str, Any]]:
        return records(self.root / "out")

    @property
    def steps(self) -> list[int]:
        return [int(record["step"]) for record in self.records]

    @property
    def occupied(self) -> list[Path]:
        """The files in the nodes' memory tiers."""
        return [path for path in self.memory.rglob("*") if path.is_file()]

    def nodes_with_ranks(self) -> set[str]:
        api, token = json.loads((self.shared / "control.json").read_text())["api"], self.shared / "api-token"
        with Client(api, token=token.read_text()) as client:
            return {str(rank["node"]) for rank in client.job(self.job)["ranks"]}

    def a_node_with_ranks(self, *, batch: str | None = None) -> str:
        """Not the one that runs the batch script, whose loss ends the allocation."""
        batch = batch or self.cluster.nodes[0]
        return min(node for node in self.nodes_with_ranks() if node != batch)

    def batch_node(self, job: str) -> str:
        return self.cluster.field(job, "BatchHost")

    def said(self, job: str) -> str:
        path = self.shared / f"slurm-{job}.out"
        return path.read_text() if path.exists() else "(no output)"

    def wait_step(self, step: int, timeout_s: float = 180.0) -> None:
        wait_until(lambda: self.steps and self.steps[-1] >= step, description=f"step {step}", timeout_s=timeout_s)

    def wait_said(self, job: str, words: str, timeout_s: float = 90.0) -> None:
        wait_until(
            lambda: words in self.said(job), description=f"{words!r} in the output of {job}", timeout_s=timeout_s
        )

    def wait_moved(self, job: str, node: str) -> None:
        """Until the node has no ranks."""
        try:
            wait_until(
                lambda: node not in self.nodes_with_ranks(),
                description=f"{node} to have no ranks",
                poll_s=0.2,
            )
        except AssertionError as error:
            raise AssertionError(f"{error}; allocation {job} said:\n{self.said(job)}") from error

    def wait_end(self, job: str, *states: str) -> None:
        try:
            self.cluster.wait_state(job, *states, timeout_s=END_TIMEOUT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; it said:\n{self.said(job)}") from error


@contextmanager
def runs(root: Path, names: Sequence[str], *, sharing: str = "NO", tracking: str = "linuxproc") -> Iterator[Run]:
    """A cluster, and a job for it."""
    local, memory = (Path(tempfile.mkdtemp(prefix="holdfast-slurm-", dir=place)) for place in ("/tmp", "/dev/shm"))
    try:
        with slurm(root / "cluster", names, sharing=sharing, tracking=tracking) as cluster:
            yield Run(root, cluster, local, memory)
    finally:
        for path in (local, memory):
            shutil.rmtree(path, ignore_errors=True)
