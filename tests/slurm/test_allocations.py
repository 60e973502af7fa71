"""Jobs as allocations of a real Slurm: spares that are used up, a time limit and what comes after it, cancellations, and two
jobs on the same node. `test_core.py` has a drain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scaling_losses import undisturbed_losses
from slurm_runs import INTERVAL_STEPS, JOB, MARKS, Run, runs
from waiting import wait_until

pytestmark = MARKS


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with runs(tmp_path, ("n0", "n1", "n2")) as made:
        yield made


def assert_undisturbed(run: Run) -> None:
    """Each step once, with the loss of a run that nothing happened to."""
    records = run.records
    steps = [record["step"] for record in records]
    assert steps == list(range(1, len(steps) + 1)), "no step twice, none left out"
    assert [record["loss"] for record in records] == undisturbed_losses(len(steps), 2)


def test_a_drained_node_that_is_resumed_in_time_and_a_job_that_completes(run: Run) -> None:
    # Longer than two looks at sinfo, which are ten seconds apart.
    (job, rest) = run.submit("--time", "30", "--chain", "2", steps=400)
    run.wait_step(20)
    node = run.a_node_with_ranks()
    run.cluster("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")
    run.wait_said(job, "hot_swap")
    run.cluster("scontrol", "update", f"NodeName={node}", "State=RESUME")
    run.wait_end(job, "COMPLETED")
    assert f"{node}: Slurm no longer drains it" in run.said(job)
    assert_undisturbed(run)
    assert len(run.steps) == 400
    run.wait_end(rest, "CANCELLED")
    assert not run.occupied, "the nodes' memory is the next user's"

    (refused,) = run.submit("--time", "30", steps=420)
    run.wait_end(refused, "FAILED")
    assert run.cluster.exit_code(refused) == 2, run.said(refused)
    (longer,) = run.submit("--time", "30", "--resume", steps=420)
    run.wait_end(longer, "COMPLETED")
    assert_undisturbed(run)
    assert len(run.steps) == 420


def test_nodes_that_lose_their_power_until_no_spare_is_left(run: Run) -> None:
    (job,) = run.submit("--time", "30", steps=350, elastic={"min_dp": 1, "max_dp": 2})
    run.wait_step(25)
    run.cluster.power_off(first := run.a_node_with_ranks())
    run.wait_moved(job, first)
    before = run.steps[-1]
    run.wait_step(before + 25)
    assert run.records[-1]["dp"] == 2, "the spare has the ranks"
    run.cluster.power_off(run.a_node_with_ranks())
    run.wait_end(job, "COMPLETED")
    said = run.said(job)
    assert "hot_swap" in said
    assert "scale_down" in said
    assert (run.steps[-1], run.records[-1]["dp"]) == (350, 1)
    assert set(run.steps) == set(range(1, 351))


def test_at_its_time_limit_the_job_is_saved_and_the_next_allocation_goes_on(run: Run) -> None:
    first, second = run.submit("--time", "3", "--notice", "90", "--chain", "2", steps=1500)
    run.wait_step(25)
    run.wait_end(first, "FAILED", "COMPLETED", "TIMEOUT")
    said = run.said(first)
    assert run.cluster.exit_code(first) == 75, said
    assert "the job is saved and suspended" in said
    before = len(run.steps)
    run.wait_step(before + 20)
    assert_undisturbed(run)
    run.holdfast("cancel", JOB, "--dir", str(run.shared))
    run.wait_end(second, "FAILED", "COMPLETED")


def test_a_cancelled_job_goes_on_at_its_last_step_when_it_is_submitted_again(run: Run) -> None:
    first, rest = run.submit("--time", "30", "--chain", "2", steps=100_000)
    run.wait_step(25)
    run.holdfast("cancel", JOB, "--dir", str(run.shared))
    run.wait_end(first, "FAILED", "COMPLETED")
    assert run.cluster.exit_code(first) == 75, run.said(first)
    assert not run.occupied, "the save is on disk and in the store"
    run.wait_end(rest, "CANCELLED")
    before = len(run.steps)
    (second,) = run.submit("--time", "30", steps=100_000)
    run.wait_step(before + 10)
    assert_undisturbed(run)

    run.cluster("scancel", second)  # with linuxproc it kills the ranks: what follows is from the last checkpoint
    run.wait_end(second, "CANCELLED")
    before = len(run.steps)
    (third,) = run.submit("--time", "30", steps=100_000)
    wait_until(lambda: len(run.steps) > before + 10, description="the third allocation to go on", timeout_s=180)
    again = run.steps[before]
    # the last interval, and one more if its save was not complete
    assert run.steps[before - 1] - 2 * INTERVAL_STEPS - 5 <= again - 1 <= run.steps[before - 1]
    assert run.steps[before : before + 10] == list(range(again, again + 10))
    run.holdfast("cancel", JOB, "--dir", str(run.shared))
    run.wait_end(third, "FAILED", "COMPLETED")


def test_scancel_saves_the_job_where_slurms_signal_goes_to_its_own_tasks_only(tmp_path: Path) -> None:
    """As with cgroups. Without them, process groups have the same effect: agents and workers have groups of their own."""
    with runs(tmp_path, ("n0", "n1", "n2"), tracking="pgid") as run:
        first, second = run.submit("--time", "30", "--chain", "2", steps=100_000)
        run.wait_step(25)
        run.cluster("scancel", first)
        run.wait_end(first, "CANCELLED")
        said = run.said(first)
        assert "Slurm ends the allocation" in said
        saved = re.search(r"it goes on from step (\d+) ", said)
        assert saved is not None, said
        run.wait_step(int(saved[1]) + 10)  # of the next allocation of the chain
        assert_undisturbed(run)
        run.cluster("scancel", second)
        run.wait_end(second, "CANCELLED")


def test_two_jobs_on_the_same_node_have_nothing_to_do_with_each_other(tmp_path: Path) -> None:
    one_node: dict[str, Any] = {"nodes": 1, "mesh": {"dp": 2}, "nproc_per_node": 2, "spares": 0}
    with runs(tmp_path, ("n0",), sharing="FORCE:2") as first:
        second = replace(first, root=tmp_path / "second", job="other")
        second.root.mkdir()
        jobs = [each.submit("--time", "30", "--shared-nodes", steps=300, **one_node)[0] for each in (first, second)]
        for each in (first, second):
            each.wait_step(5)
        assert [first.cluster.state(job) for job in jobs] == ["RUNNING"] * 2
        for each, job in zip((first, second), jobs, strict=True):
            each.wait_end(job, "COMPLETED")
            assert_undisturbed(each)
            assert len(each.steps) == 300
