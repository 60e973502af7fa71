"""A script that knows nothing of Holdfast, in which one rank is slow: the rank is named, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from slowness import throttled, throttling
from training import Cluster, cluster
from waiting import wait_until

SCRIPT = """
import os
import sys
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
open(f"{sys.argv[1]}/pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
steps = open(f"{sys.argv[1]}/{os.environ['RANK']}", "ab", buffering=0)
while True:
    steps.write(b".")
    time.sleep(0.03)  # a device works meanwhile: three ranks on two cores would slow each other down
    optimizer.zero_grad()
    model(torch.randn(8, 256)).square().mean().backward()
    optimizer.step()
"""
JOB = "plain"
SLOW_RANK = 1
HEALTHY_STEPS = 250  # before the fault: more blocks than a window has
FOUND_S = 90.0


def job(script: Path, **more: Any) -> dict[str, Any]:
    return {
        "name": JOB,
        "script": str(script),
        "nodes": 3,
        "nproc_per_node": 1,
        "mesh": {"dp": 3},
        "chaos": True,
        **more,
    }


def found(run: Cluster) -> list[dict[str, Any]]:
    run.stack.check()
    return [finding for finding in run.client.findings(job=JOB) if finding["kind"] == "straggler"]


@contextmanager
def injected(run: Cluster, pid: int) -> Iterator[None]:
    run.client.inject_fault(JOB, "slow", SLOW_RANK, 120.0, 0)
    yield


CAUSES: dict[str, Callable[[Cluster, int], AbstractContextManager[None]]] = {
    "an injected fault": injected,
    "a cgroup that throttles it": lambda run, pid: throttled(pid, 0.04),
}
NOT_HERE = {"a cgroup that throttles it": throttling()}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_slow_rank_of_a_plain_ddp_script_is_named(cause: str, tmp_path: Path) -> None:
    if reason := NOT_HERE.get(cause):
        pytest.skip(reason)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with cluster(tmp_path / "stack", nodes=3) as run:
        run.client.submit(job(script, args=[str(tmp_path)]))
        run.wait(JOB, "it runs", lambda view: view["phase"] == "running")
        slow = run.node_of(JOB, SLOW_RANK)

        def healthy_steps() -> bool:
            run.stack.check()
            return all((tmp_path / str(rank)).stat().st_size >= HEALTHY_STEPS for rank in range(3))

        wait_until(healthy_steps, description=f"{HEALTHY_STEPS} steps of each rank")
        assert found(run) == [], "nobody is slow"
        with CAUSES[cause](run, int((tmp_path / f"pid-{SLOW_RANK}").read_text())):
            wait_until(lambda: bool(found(run)), description="the slow rank to be found", timeout_s=FOUND_S)
        finding = found(run)[0]
        assert (finding["rank"], finding["node"]) == (SLOW_RANK, slow), finding
        assert finding["severity"] == "warning"
        assert finding["evidence"]["measured"] == "work"
        assert finding["evidence"]["cause"] == "slow_worker"
        view = run.client.job(JOB)
        assert (view["phase"], view["generation"], view["step"]) == ("running", 1, None), "what is observed is no step"
        assert HEALTHY_STEPS <= view["observed_steps"] + 64 <= (tmp_path / "0").stat().st_size + 64, "of all ranks"
        assert view["observed_step_s"] > 0.03
        goodput = run.client.goodput(JOB)
        assert (goodput["goodput_job"], goodput["useful_s"]) == (None, 0.0)
        assert goodput["unmeasured_s"] > 0.5 * goodput["wall_s"], goodput
        run.client.stop(JOB, "the test is over")
