"""Meshes with the pipeline outermost under the whole stack: a crash leaves no trace, a replica leaves and returns.

Both runs are compared with one that nothing has disturbed. They are stopped when they have recovered and stepped on, since
how many steps that takes depends on the machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from losses import losses
from training import Cluster, cluster

pytestmark = pytest.mark.timeout(900)  # the first test waits for all three runs

SCRIPT = Path(__file__).parents[1] / "mesh_train.py"
MESH = {"pp": 2, "dp": 2, "tp": 2}
PAUSE_S = 0.1  # eight ranks with short pauses take all cores for as long as the job runs
STEPS_MORE = 10


@dataclass(frozen=True, slots=True)
class Rough:
    incidents: list[dict[str, Any]]
    saved: int  # the step that was saved when the fault came
    losses: dict[int, float]


def mesh_job(
    name: str, out: Path, *, nodes: int, nproc: int, min_dp: int, steps: int = 1_000_000, pause_s: float = PAUSE_S
) -> dict[str, Any]:
    return {
        "name": name,
        "script": str(SCRIPT),
        "args": ["--steps", str(steps), "--out", str(out), "--pause-s", str(pause_s)],
        "nodes": nodes,
        "nproc_per_node": nproc,
        "mesh": MESH,
        "elastic": {"min_dp": min_dp, "max_dp": MESH["dp"]},
        "checkpoint": {"interval_steps": 20, "keep": 2},  # peers keep up on a busy machine: one step has all copies
        "checks": {"replica_every_steps": 5},
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("stack"), nodes=4, workers_per_node=4) as run:
        yield run


@pytest.fixture(scope="module")
def crashed(run: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Rough:
    """Each of two nodes runs one stage of both replicas."""
    out = tmp_path_factory.mktemp("crashed")
    run.client.submit(mesh_job("crashed", out, nodes=2, nproc=4, min_dp=2))
    run.wait_step("crashed", 8)
    saved = run.saved_step("crashed")
    run.inject.crash("crashed", 5)
    incidents = run.wait_resolved("crashed", 1)
    run.wait_step("crashed", incidents[0]["restored_step"] + STEPS_MORE)
    run.client.stop("crashed", "seen enough")
    run.wait_end("crashed")
    return Rough(incidents, saved, losses(out))


@pytest.fixture(scope="module")
def resized(run: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Rough:
    """Nodes 0 and 2 of the mesh are one replica, 1 and 3 the other: the numbers of the ranks that stay change."""
    out = tmp_path_factory.mktemp("resized")
    run.client.submit(mesh_job("resized", out, nodes=4, nproc=2, min_dp=1))
    run.wait_step("resized", 12)
    lost = run.node_of("resized", 0)
    assert lost == run.node_of("resized", 1)
    stays = run.node_of("resized", 6)  # stage 1 of the other replica
    saved = run.saved_step("resized", without=lost)
    run.inject.node_loss(lost)
    smaller = run.wait(
        "resized",
        "one replica",
        lambda view: view["phase"] == "running" and dict(view["mesh"]) == {"pp": 2, "dp": 1, "tp": 2},
    )
    assert list(smaller["mesh"]) == ["pp", "dp", "tp"]
    assert run.node_of("resized", 2) == stays, "at the same position, under another number"
    run.wait_step("resized", smaller["step"] + STEPS_MORE)
    run.inject.node_return(lost)
    grown = run.wait("resized", "two replicas", lambda view: view["phase"] == "running" and view["mesh"]["dp"] == 2)
    run.wait_step("resized", grown["step"] + STEPS_MORE)
    incidents = run.wait_resolved("resized", 2)
    run.client.stop("resized", "seen enough")
    run.wait_end("resized")
    return Rough(incidents, saved, losses(out))


@pytest.fixture(scope="module")
def calm(run: Cluster, crashed: Rough, resized: Rough, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    out = tmp_path_factory.mktemp("calm")
    steps = max(*crashed.losses, *resized.losses)
    run.client.submit(mesh_job("calm", out, nodes=4, nproc=2, min_dp=1, steps=steps, pause_s=0.0))
    assert run.wait_end("calm")["phase"] == "completed"
    found = losses(out)
    assert set(found) == set(range(1, steps + 1))
    return found


def until(last: int, values: dict[int, float]) -> dict[int, float]:
    return {step: value for step, value in values.items() if step <= last}


def test_two_nodes_of_four_ranks_with_pp_outermost_recover_bit_for_bit(crashed: Rough, calm: dict[int, float]) -> None:
    (incident,) = crashed.incidents
    assert incident["action"]["kind"] == "restart"
    assert max(crashed.losses) >= incident["restored_step"] >= crashed.saved > 0
    assert crashed.losses == until(max(crashed.losses), calm)


def test_a_replica_that_is_spread_over_the_stages_leaves_and_returns(resized: Rough, calm: dict[int, float]) -> None:
    assert [incident["action"]["kind"] for incident in resized.incidents[:2]] == ["scale_down", "scale_up"]
    assert resized.incidents[0]["restored_step"] >= resized.saved
    # Sums in another order round differently, and no more.
    assert resized.losses == pytest.approx(until(max(resized.losses), calm), rel=1e-3)
