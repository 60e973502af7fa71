"""Meshes with the pipeline outermost under the whole stack: a crash leaves no trace, a replica leaves and returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from losses import losses
from training import cluster

SCRIPT = Path(__file__).parents[1] / "mesh_train.py"
PAUSE_S = 0.02
ENDLESS_PAUSE_S = 0.1  # eight ranks with short pauses take all cores for as long as the job runs
STEPS = 120  # the run must outlast the reports of its steps, which are sent once a second


def mesh_job(
    name: str, out: Path, steps: int, mesh: dict[str, int], *, nodes: int, nproc: int, min_dp: int, pause_s: float = 0.0
) -> dict[str, Any]:
    return {
        "name": name,
        "script": str(SCRIPT),
        "args": ["--steps", str(steps), "--out", str(out), "--pause-s", str(pause_s)],
        "nodes": nodes,
        "nproc_per_node": nproc,
        "mesh": mesh,
        "elastic": {"min_dp": min_dp, "max_dp": mesh["dp"]},
        "checkpoint": {"interval_steps": 20, "keep": 2},  # peers keep up on a busy machine: one step has all copies
        "checks": {"replica_every_steps": 5},
    }


def test_two_nodes_of_four_ranks_with_pp_outermost_recover_bit_for_bit(tmp_path: Path) -> None:
    """Each node runs one stage of both replicas."""
    mesh = {"pp": 2, "dp": 2, "tp": 2}
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    with cluster(tmp_path / "stack", nodes=2, workers_per_node=4) as run:
        run.client.submit(mesh_job("rough", rough, STEPS, mesh, nodes=2, nproc=4, min_dp=2, pause_s=PAUSE_S))
        run.wait_step("rough", 8)
        saved = run.saved_step("rough")
        run.inject.crash("rough", 5)
        incidents = run.wait_resolved("rough", 1)
        assert run.wait_end("rough")["phase"] == "completed"
        run.client.submit(mesh_job("calm", calm, STEPS, mesh, nodes=2, nproc=4, min_dp=2))
        assert run.wait_end("calm")["phase"] == "completed"
    assert [incident["action"]["kind"] for incident in incidents] == ["restart"]
    assert incidents[0]["restored_step"] >= saved
    assert losses(rough) == losses(calm)
    assert set(losses(calm)) == set(range(1, STEPS + 1))


def test_a_replica_that_is_spread_over_the_stages_leaves_and_returns(tmp_path: Path) -> None:
    """Nodes 0 and 2 of the mesh are one replica, 1 and 3 the other: the numbers of the ranks that stay change."""
    mesh = {"pp": 2, "dp": 2, "tp": 2}
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    with cluster(tmp_path / "stack", nodes=4, workers_per_node=2) as run:
        run.client.submit(
            mesh_job("rough", rough, 1_000_000, mesh, nodes=4, nproc=2, min_dp=1, pause_s=ENDLESS_PAUSE_S)
        )
        run.wait_step("rough", 12)
        lost = run.node_of("rough", 0)
        assert lost == run.node_of("rough", 1)
        stays = run.node_of("rough", 6)  # stage 1 of the other replica
        saved = run.saved_step("rough", without=lost)
        run.inject.node_loss(lost)
        smaller = run.wait(
            "rough",
            "one replica",
            lambda view: view["phase"] == "running" and dict(view["mesh"]) == {"pp": 2, "dp": 1, "tp": 2},
        )
        assert list(smaller["mesh"]) == ["pp", "dp", "tp"]
        assert run.node_of("rough", 2) == stays, "at the same position, under another number"
        run.wait_step("rough", smaller["step"] + 10)
        run.inject.node_return(lost)
        grown = run.wait("rough", "two replicas", lambda view: view["phase"] == "running" and view["mesh"]["dp"] == 2)
        run.wait_step("rough", grown["step"] + 10)
        incidents = run.wait_resolved("rough", 2)
        run.client.stop("rough", "seen enough")
        run.wait_end("rough")
        got = losses(rough)
        run.client.submit(mesh_job("calm", calm, max(got), mesh, nodes=4, nproc=2, min_dp=1))
        assert run.wait_end("calm")["phase"] == "completed"
    assert [incident["action"]["kind"] for incident in incidents[:2]] == ["scale_down", "scale_up"]
    assert incidents[0]["restored_step"] >= saved
    assert got == pytest.approx(losses(calm), rel=1e-3), "sums in another order round differently, and no more"
