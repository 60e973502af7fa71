"""A suspected node, in a real stack: SIGSEGV of a rank → finding → decision → Prepare with tests → ranks here, or elsewhere."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from training import Cluster, cluster, gpt_job

JOB = "gpt"
STEPS_MAX = 1_000_000


def port(root: Path, state: str, phys_state: str) -> None:
    """The only port of this machine: of all nodes, which share it. Only who is suspected looks."""
    place = root / "mlx5_0" / "ports" / "1"
    place.mkdir(parents=True, exist_ok=True)
    for name, word in (("state", state), ("phys_state", phys_state), ("link_layer", "InfiniBand")):
        (place / name).write_text(f"1: {word}\n")


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sys") / "infiniband"
    port(root, "ACTIVE", "LinkUp")
    return root


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, ports: Path) -> Iterator[Cluster]:
    """dp 3 on three nodes, each with one fault, since the default policy swaps a node at its second; and a spare."""
    with cluster(tmp_path_factory.mktemp("stack"), nodes=4, environment={"HOLDFAST_INFINIBAND": str(ports)}) as run:
        run.client.submit(gpt_job(JOB, tmp_path_factory.mktemp("out"), dp=3, pp=1, steps=STEPS_MAX))
        run.wait_step(JOB, 10)
        yield run


def end_by(run: Cluster, rank: int, number: signal.Signals) -> tuple[str, dict[str, Any]]:
    """The node of this rank, and the incident that its end by this signal was."""
    worker = next(worker for worker in run.client.job(JOB)["ranks"] if worker["rank"] == rank)
    count = len(list(run.client.incidents(JOB)))
    os.kill(worker["pid"], number)
    incident = run.wait_resolved(JOB, count + 1)[-1]
    run.wait_step(JOB, incident["restored_step"] + 5)
    return worker["node"], incident


def test_a_killed_rank_suspects_nobody(run: Cluster) -> None:
    node, incident = end_by(run, 0, signal.SIGKILL)
    assert incident["action"]["kind"] == "restart"
    assert "self_test" not in incident["phases_s"]
    assert "self_test" not in incident["evidence"]
    assert run.node_of(JOB, 0) == node


def test_a_suspect_whose_tests_find_nothing_trains_on(run: Cluster) -> None:
    node, incident = end_by(run, 1, signal.SIGSEGV)
    assert (incident["node"], incident["action"]["kind"]) == (node, "restart")
    assert incident["phases_s"]["self_test"] < 10.0
    assert incident["evidence"]["self_test"].startswith((f"{node} passed", f"{node} not concluded"))  # of busy cores
    assert run.node_of(JOB, 1) == node


def test_a_suspect_that_fails_its_tests_is_replaced_in_the_same_change(run: Cluster, ports: Path) -> None:
    port(ports, "DOWN", "Polling")
    before = run.client.job(JOB)["generation"]
    node, incident = end_by(run, 2, signal.SIGSEGV)
    assert (incident["node"], incident["action"]["kind"]) == (node, "restart"), "the policy was asked once"
    failure = "ports: mlx5_0 port 1 was active, and is DOWN (Polling)"
    assert f"{node} failed ({failure})" in incident["evidence"]["self_test"]
    assert run.node_of(JOB, 2) != node
    assert run.client.job(JOB)["generation"] == before + 2, "planned, and planned again without the node"
    [view] = [each for each in run.client.nodes() if each["node"] == node]
    assert failure in view["reason"]
