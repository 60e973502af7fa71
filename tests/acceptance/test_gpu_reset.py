"""A GPU that must be reset, in a real stack: kernel line → finding → decision → order → command → tests of the node → ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from losses import losses
from resets import StandInGpus
from training import Cluster, cluster, gpt_job

JOB = "gpt"
STEPS_MAX = 1_000_000


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> StandInGpus:
    return StandInGpus.make(tmp_path_factory.mktemp("gpus") / "node", 2)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("out")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, gpus: StandInGpus, out: Path) -> Iterator[Cluster]:
    """dp 2 on two nodes, and a spare."""
    environment = {"HOLDFAST_GPU_RESET_COMMAND": gpus.command, "HOLDFAST_GPU_DEVICES": str(gpus.devices)}
    with cluster(tmp_path_factory.mktemp("stack"), nodes=3, environment=environment) as run:
        run.client.submit(gpt_job(JOB, out, dp=2, pp=1, steps=STEPS_MAX))
        run.wait_step(JOB, 10)
        yield run


def test_the_gpu_is_reset_and_the_same_node_trains_on(run: Cluster, gpus: StandInGpus, out: Path) -> None:
    node = run.node_of(JOB, 1)
    saved = run.saved_step(JOB)
    run.inject.xid(node, 95)
    [incident] = run.wait_resolved(JOB, 1)
    assert (incident["kind"], incident["node"], incident["action"]["kind"]) == ("gpu_error", node, "gpu_reset")
    assert "must be reset before it is used again" in incident["action"]["reason"]
    assert gpus.resets == ["0,1"], "the line names no GPU that this machine has: all of the node, once"
    assert incident["phases_s"]["gpu_reset"] > 0
    assert incident["phases_s"]["self_test"] > 0
    assert incident["restored_step"] >= saved
    trained = max(losses(out))
    run.wait_step(JOB, trained + 10)
    assert run.node_of(JOB, 1) == node
    assert run.client.job(JOB)["generation"] == 2


def test_a_reset_that_fails_gives_the_ranks_to_the_spare(run: Cluster, gpus: StandInGpus, out: Path) -> None:
    """On the other node, which was not reset today."""
    before, node = gpus.resets, run.node_of(JOB, 0)
    gpus.behave("fails")
    run.inject.xid(node, 48)
    incident = run.wait_resolved(JOB, 2)[-1]
    assert (incident["node"], incident["action"]["kind"]) == (node, "hot_swap")
    assert "Unable to reset GPU 0,1: Unknown Error" in incident["action"]["reason"]
    assert "Unable to reset GPU 0,1: Unknown Error" in incident["evidence"]["gpu_reset"]
    assert gpus.resets == before
    run.wait_step(JOB, max(losses(out)) + 10)
    assert run.node_of(JOB, 0) != node
    [view] = [each for each in run.client.nodes() if each["node"] == node]
    assert "GPU reset failed" in view["reason"]
