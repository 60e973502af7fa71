"""What a job has saved outlives it: the end, a new submission under its name, a restart of the replicator."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from replicator_node import JOB, Node, nodes
from waiting import wait_until

from holdfast.domain.generations import ShardKey
from holdfast.replicator.tiers import find


def images(node: Node) -> list[Path]:
    return find(node.memory / JOB, "w*/*.image")


def save(node: Node, *steps: int, attempt: int = 1) -> list[ShardKey]:
    worker = node.images()
    keys = []
    for step in steps:
        keys.append(node.save(worker, step, attempt=attempt))
        node.wait_for(keys[-1], "disk")
    worker.close()
    return keys


def test_a_job_that_is_over_keeps_its_steps_on_disk_and_gives_its_memory_back(tmp_path: Path) -> None:
    with nodes(tmp_path, "a") as (a,):
        a.configure()
        first, last = save(a, 10, 20)
        a.end()
        wait_until(lambda: not images(a), description="the memory to be given back")
        assert a.holdings() == {(first, "disk"), (last, "disk")}
        a.stop()
        a.start()
        assert a.holdings() == {(first, "disk"), (last, "disk")}


def test_the_last_save_is_not_lost_when_the_job_ends_before_it_is_reported(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", HOLDFAST_REPLICATOR_RESCAN_INTERVAL_S="3600") as (a,):
        a.configure()
        save(a, 10)
        last = a.save(a.images(), 20, note=False)
        a.end()
        a.wait_for(last, "disk")
        wait_until(lambda: not images(a), description="the memory to be given back")


def test_a_new_submission_under_the_name_leaves_the_steps_of_the_old_one_alone(tmp_path: Path) -> None:
    with nodes(tmp_path, "a") as (a,):
        a.configure()
        first, last = save(a, 10, 20)
        a.end()
        a.configure(generation=2, attempt=100, first_attempt=100)
        save(a, 5, 15, 25, 35, attempt=100)
        a.retain(35, attempt=100)
        a.wait_without(ShardKey(100, 5, 0), "disk")
        assert {(first, "disk"), (last, "disk")} <= a.holdings()


def test_a_word_about_the_end_of_an_older_generation_says_nothing(tmp_path: Path) -> None:
    with nodes(tmp_path, "a") as (a,):
        a.configure(generation=2, attempt=2)
        save(a, 10, attempt=2)
        a.end(generation=1)
        save(a, 20, attempt=2)
        assert images(a)


def test_steps_are_deleted_when_somebody_asks_for_it_and_a_running_job_keeps_its_own(tmp_path: Path) -> None:
    with nodes(tmp_path, "a") as (a,):
        a.configure()
        first, last = save(a, 10, 20)
        with pytest.raises(grpc.RpcError) as refused:
            a.prune((1, 10))
        assert refused.value.details() == "job llm has not ended and may need step 10 (attempt 1)"
        a.end()
        a.prune((1, 10))
        a.wait_without(first, "disk")
        assert (last, "disk") in a.holdings()
        a.prune((1, 20))
        wait_until(lambda: not (a.disk / JOB).exists(), description="the directory to be gone with its last step")


def test_what_has_been_kept_for_as_long_as_it_was_to_be_is_deleted(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", HOLDFAST_REPLICATOR_RETENTION_S="0.2") as (a,):
        a.configure()
        save(a, 10)
        a.end()
        wait_until(lambda: not (a.disk / JOB).exists(), description="what has expired to be deleted")


def test_a_term_signal_during_a_save_tears_nothing_and_forgets_nothing(tmp_path: Path) -> None:
    """What an agent that is asked to end does to its replicator."""
    with nodes(tmp_path, "a") as (a,):
        a.configure()
        (first,) = save(a, 10)
        worker = a.images()
        last = a.save(worker, 20)  # its copy to the disk is under way, or about to begin
        a.stop()
        worker.close()
        a.start()
        assert (first, "disk") in a.holdings()
        a.wait_for(last, "disk")
        for key in (first, last):
            assert a.stage(key, a).shard == key, "verified before it is handed out"
