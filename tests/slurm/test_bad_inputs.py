"""What people get wrong around an allocation, on a real Slurm: each is said with what would be right, and loses no run."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_runs import JOB, MARKS, Run, runs
from waiting import wait_until

from holdfast.cli.slurm.chain import Chain
from holdfast.cli.slurm.ending import FILE as ENDING

pytestmark = MARKS


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with runs(tmp_path, ("n0", "n1")) as made:
        yield made


def own_script(run: Run, chain: Chain, *options: str, directory: Path | None = None) -> str:
    """Submit a batch script that somebody has written. Return the number of its allocation."""
    command = [sys.executable, "-m", "holdfast.cli.main", "slurm", "allocation", str(run.root / "job.yaml")]
    command += ["--chain", chain.id, *run.places()]
    if directory is not None:
        command[command.index("--dir") + 1] = str(directory)
    lines = [f"--job-name={JOB}", "--ntasks-per-node=1", f"--output={run.shared}/slurm-%j.out", "--time=30", *options]
    script = run.root / "own.sbatch"
    script.write_text("\n".join(["#!/bin/bash", *(f"#SBATCH {each}" for each in lines), shlex.join(command), ""]))
    run.shared.mkdir(exist_ok=True)
    return run.cluster("sbatch", "--parsable", str(script)).strip()


def test_a_script_that_would_lose_the_run_and_files_of_another_allocation(run: Run) -> None:
    run.write(steps=10, nodes=1, mesh={"dp": 1}, spares=0)
    chain = Chain.new(JOB)
    run.shared.mkdir()
    chain.write(run.shared)
    (run.shared / ENDING).write_text(json.dumps({"slurm_job": "4711", "ends_at": 1.0}))
    (run.shared / "control.json").write_text('{"slurm_job": "4711", "api": "http://127.0.0.1:9"')
    job = own_script(run, chain, "--nodes=1", "--signal=USR1@60")
    run.wait_end(job, "COMPLETED")
    said = run.said(job)
    assert "without --no-kill, Slurm ends the whole allocation" in said
    assert "without --no-requeue, Slurm may start the allocation again" in said
    assert "--signal=USR1@60 goes to all processes" in said
    assert run.steps == list(range(1, 11)), "the end of another allocation is not this one's"
    assert json.loads((run.shared / "control.json").read_text())["slurm_job"] == job


def test_a_directory_that_is_not_shared_and_one_of_a_later_submission(run: Run) -> None:
    run.write(steps=10)
    mine, later = Chain.new(JOB), Chain.new(JOB)
    run.shared.mkdir()
    later.write(run.shared)
    first = own_script(run, mine, "--nodes=1", directory=run.root / "on this node only")
    run.wait_end(first, "FAILED")
    assert "--dir must be on a file system that the login node and all nodes share" in run.said(first)
    second = own_script(run, mine, "--nodes=1")
    run.wait_end(second, "FAILED")
    assert f"{JOB} has been submitted from it again since" in run.said(second)
    assert (run.cluster.exit_code(first), run.cluster.exit_code(second)) == (2, 2)
    assert run.steps == []


def test_a_controller_that_hangs_does_not_stop_a_run(run: Run) -> None:
    (job,) = run.submit("--time", "30", steps=100_000, nodes=1, mesh={"dp": 1}, spares=0)
    run.wait_step(5)
    with run.cluster.hanging():
        run.wait_said(job, "the states of nodes are unknown: sinfo", timeout_s=120)  # it gives up, or is given up
        before = run.steps[-1]
        run.wait_step(before + 20)
    wait_until(lambda: run.cluster.state(job) == "RUNNING", description="the controller to answer", timeout_s=60)
    run.holdfast("cancel", JOB, "--dir", str(run.shared))
    run.wait_end(job, "FAILED", "COMPLETED")
    assert run.steps == list(range(1, len(run.steps) + 1))
    assert run.cluster.exit_code(job) == 75, run.said(job)


def test_a_second_submission_of_a_job_that_runs_is_refused(run: Run) -> None:
    (job,) = run.submit("--time", "30", steps=100_000, nodes=1, mesh={"dp": 1}, spares=0)
    with pytest.raises(AssertionError, match=rf"Slurm has 1 job of the name {JOB} \({job}\)"):
        replace(run).submit("--time", "30", steps=10)
    run.cluster("scancel", job)
    run.wait_end(job, "CANCELLED")
