"""A node loses its replicator and then a rank: the job steps again from the newest step that was known to be saved."""

from __future__ import annotations

from pathlib import Path

import psutil
from losses import losses
from training import Cluster, cluster, gpt_job

INTERVAL_STEPS = (
    20  # long enough that no save is skipped because the replicator still reads the images, on a busy machine
)


def replicator_of(run: Cluster, node: str) -> psutil.Process:
    agent = psutil.Process(run.stack.service_pids()[node])
    [found] = [child for child in agent.children() if "holdfast.replicator" in child.cmdline()]
    return found


def test_a_rank_that_dies_after_its_node_s_replicator_restores_the_newest_known_step(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with cluster(tmp_path / "stack", nodes=2) as run:
        run.client.submit(gpt_job("gpt", out, dp=2, pp=1, steps=100_000, interval_steps=INTERVAL_STEPS))
        run.wait_step("gpt", 3 * INTERVAL_STEPS + 2)
        node = run.node_of("gpt", 1)
        saved = run.client.job("gpt")["checkpoint_step"]
        assert saved >= 2 * INTERVAL_STEPS, "there are older steps that could be taken"
        replicator_of(run, node).kill()
        run.inject.crash("gpt", 1)
        [incident] = run.wait_resolved("gpt", 1)
        assert incident["state"] == "resolved"
        assert incident["action"]["kind"] == "restart"
        # A save of the same moment, which the replicator had not reported when it was killed, is found too late for this one.
        assert incident["restored_step"] >= saved
        stepped = run.client.job("gpt")["step"] or 0
        run.wait_step("gpt", stepped + INTERVAL_STEPS)
        assert replicator_of(run, node).is_running()
        run.client.stop("gpt", "the test is over")
        run.wait_end("gpt")
    seen = losses(out)
    assert sorted(seen) == [*range(1, max(seen) + 1)], "no step is missing"
