"""The short version of these tests, for each change: one allocation in which a node is drained and another is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from scaling_losses import undisturbed_losses
from slurm_runs import JOB, MARKS, runs

pytestmark = [*MARKS, pytest.mark.core]

# As sites name them: Slurm shortens them to gpu-[07-08],n1,rack2-b03.
NODES = ("n1", "gpu-07", "gpu-08", "rack2-b03")


def test_a_drained_node_and_then_a_lost_one_are_swapped_and_the_job_is_cancelled_at_a_saved_step(
    tmp_path: Path,
) -> None:
    with runs(tmp_path, NODES) as run:
        (job,) = run.submit("--time", "30", "--spares", "2", steps=100_000)
        run.wait_step(10)
        batch = run.batch_node(job)

        drained = run.a_node_with_ranks(batch=batch)
        run.cluster("scontrol", "update", f"NodeName={drained}", "State=DRAIN", "Reason=disk | to be replaced")
        run.wait_moved(job, drained)
        before = run.steps[-1]
        run.wait_step(before + 10)
        assert f"{drained}: Slurm: draining (disk | to be replaced)" in run.said(job)
        steps = run.steps
        assert steps == list(range(1, steps[-1] + 1)), "no step twice, none left out"

        lost = run.a_node_with_ranks(batch=batch)
        run.cluster.power_off(lost)
        run.wait_moved(job, lost)
        before = run.steps[-1]
        run.wait_step(before + 10)

        run.holdfast("cancel", JOB, "--dir", str(run.shared))
        run.wait_end(job, "FAILED", "CANCELLED", "COMPLETED")
        said = run.said(job)
        assert run.cluster.exit_code(job) == 75, said
        assert said.count("hot_swap") >= 2, said
        records = run.records
        expected = undisturbed_losses(records[-1]["step"], 2)
        assert [record["loss"] for record in records] == [expected[record["step"] - 1] for record in records]
        assert f"step {records[-1]['step']}" in said, "what was computed last is what is saved"
