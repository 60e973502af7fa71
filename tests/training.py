"""What acceptance tests share: a local stack, a small GPT job on it, and faults addressed by condition."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from waiting import wait_until
from warm_stack import warm_or_new

from holdfast.cli.client import Client
from holdfast.cli.inject import Injector
from holdfast.cli.processes import Process
from holdfast.cli.run import wait_for_nodes
from holdfast.cli.stack import LocalStack
from holdfast.cli.stack_options import StackOptions

START_TIMEOUT_S = 120.0
STEP_TIMEOUT_S = 120.0
GLOBAL_BATCH = 12
PACED = Path(__file__).parent / "paced_train.py"
ENDED = ("completed", "failed", "stopped")


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running stack and the ways to talk to it and to hurt it."""

    stack: LocalStack
    client: Client

    @property
    def inject(self) -> Injector:
        return Injector(self.client)

    def node_of(self, job: str, rank: int) -> str:
        return next(str(worker["node"]) for worker in self.client.job(job)["ranks"] if worker["rank"] == rank)

    def saved_step(self, job: str, without: str | None = None) -> int:
        """The newest complete saved step, also `without` that node: what is restored after a fault is no older."""
        found: list[int] = []

        def survives() -> bool:
            steps = list(self.client.checkpoints(job))
            newest = next((place for place, each in enumerate(steps) if each["newest"]), len(steps))
            for each in steps[newest:]:
                holders = self.client.checkpoint_holders(job, each["attempt"], each["step"])
                remain = [rank for rank, nodes in holders.items() if set(nodes) - {without}]
                if each["complete"] and len(remain) == math.prod(each["mesh"].values()):
                    found.append(int(each["step"]))
                    return True
            return False

        wait_until(survives, description=f"{job}: a saved step that outlives {without}", timeout_s=STEP_TIMEOUT_S)
        return found[0]

    def wait(
        self,
        job: str,
        description: str,
        condition: Callable[[dict[str, Any]], bool],
        timeout_s: float = START_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Wait until the job's view fulfils `condition`; a service that died or a job that failed ends the wait."""
        seen: dict[str, Any] = {}

        def holds() -> bool:
            self.stack.check()
            seen.update(self.client.job(job))
            assert seen["phase"] != "failed" or condition(seen), f"{job} failed: {seen['reason']}"
            return condition(seen)

        wait_until(holds, description=f"{job}: {description}", timeout_s=timeout_s)
        return seen

    def wait_step(self, job: str, step: int) -> dict[str, Any]:
        return self.wait(job, f"step {step}", lambda view: view["phase"] == "running" and (view["step"] or 0) >= step)

    def wait_resolved(self, job: str, count: int, timeout_s: float = STEP_TIMEOUT_S) -> list[dict[str, Any]]:
        """Wait until `count` incidents are closed; returns them, oldest first."""

        def closed() -> list[dict[str, Any]]:
            incidents = sorted(self.client.incidents(job), key=lambda incident: incident["fault_at"])
            return [incident for incident in incidents if incident["state"] in ("resolved", "failed")]

        wait_until(
            lambda: len(closed()) >= count, description=f"{count} closed incidents of {job}", timeout_s=timeout_s
        )
        return closed()

    def wait_decided(self, job: str) -> dict[str, Any]:
        """Wait until a policy has answered for an incident of the job; returns the newest of them."""

        def decided() -> list[dict[str, Any]]:
            return [incident for incident in self.client.incidents(job) if incident["action"] is not None]

        wait_until(lambda: bool(decided()), description=f"a decision about {job}", timeout_s=STEP_TIMEOUT_S)
        return decided()[0]

    def wait_end(self, job: str, timeout_s: float = START_TIMEOUT_S) -> dict[str, Any]:
        return self.wait(job, "the end", lambda view: view["phase"] in ENDED, timeout_s)

    def wait_failed(self, job: str) -> dict[str, Any]:
        """Wait until the job has failed."""
        return self.wait(job, "its failure", lambda view: view["phase"] == "failed")


class WarmStack(LocalStack):
    """Its processes are forks of one that has imported what they import, where that makes no difference."""

    def _run(self, part: str, module: str, environment: Mapping[str, str], output: IO[bytes]) -> Process:
        started = warm_or_new(module, environment, self.directory.absolute(), output)
        return started or super()._run(part, module, environment, output)


@contextmanager
def cluster(
    directory: Path, nodes: int, workers_per_node: int = 1, environment: Mapping[str, str] | None = None
) -> Iterator[Cluster]:
    """`environment` is added to that of every process."""
    options = StackOptions(
        directory=directory, nodes=nodes, workers_per_node=workers_per_node, environment=environment or {}
    )
    with WarmStack(options) as stack, Client(stack.api_url) as client:
        wait_for_nodes(client, stack, nodes)
        yield Cluster(stack, client)


def gpt_job(
    name: str,
    out: Path,
    *,
    dp: int,
    pp: int,
    steps: int,
    interval_steps: int = 10,
    min_dp: int | None = None,
    pause_s: float = 0.05,
) -> dict[str, Any]:
    """The example GPT, small, one worker per node. `pause_s`: in each step; without a pause the ranks take all cores.

    A step of two ranks costs the stack 40 ms of CPU time, three quarters of which are not the ranks': a job that runs until a
    test has seen enough must not step as fast as it can."""
    # As many samples in a forward pass as every size of the job allows. Stages need several passes, to overlap.
    micro_batch = 2 if pp > 1 else GLOBAL_BATCH // math.lcm(*range(min_dp or dp, dp + 1))
    return {
        "name": name,
        "script": str(PACED),
        "args": [str(pause_s), "--steps", str(steps), "--layers", "2", "--width", "32", "--seq", "32",
                 "--global-batch", str(GLOBAL_BATCH), "--micro-batch", str(micro_batch), "--out", str(out)],
        "nodes": dp * pp,
        "nproc_per_node": 1,
        "mesh": {"dp": dp, "pp": pp},
        "elastic": {"min_dp": min_dp or dp, "max_dp": dp},
        "checkpoint": {"interval_steps": interval_steps, "keep": 2},
    }  # fmt: skip
