"""State sharded over dp (FSDP2) survives a change of the number of replicas: the new ranks are made of all old parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training import cluster, losses

from holdfast.cli.demo.scenario import examples

STEPS = 600
CLOSE = 2e-4  # a sum over other ranks rounds otherwise


def fsdp_job(name: str, out: Path) -> dict[str, Any]:
    return {
        "name": name,
        "script": str(examples() / "fsdp" / "train.py"),
        "args": ["--steps", str(STEPS), "--layers", "2", "--width", "32", "--heads", "2", "--seq", "32",
                 "--out", str(out)],
        "nodes": 2,
        "nproc_per_node": 1,
        "mesh": {"dp": 2},
        "elastic": {"min_dp": 1, "max_dp": 2},
        "checkpoint": {"interval_steps": 5, "keep": 2},
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_sharded_state_shrinks_with_a_lost_node_and_grows_when_it_is_back(tmp_path: Path) -> None:
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    with cluster(tmp_path / "stack", nodes=2) as run:
        run.client.submit(fsdp_job("calm", calm))
        assert run.wait_end("calm")["phase"] == "completed"

        run.client.submit(fsdp_job("rough", rough))
        run.wait_step("rough", 22)
        lost = run.node_of("rough", 1)
        run.inject.node_loss(lost)
        [shrunk] = run.wait_resolved("rough", 1)
        assert shrunk["action"]["kind"] == "scale_down"
        assert shrunk["restored_step"] >= 10
        smaller = run.wait(
            "rough", "one replica", lambda view: view["mesh"] == {"dp": 1} and view["phase"] == "running"
        )
        run.wait_step("rough", smaller["step"] + 10)
        run.stack.power_on(lost)
        grown = run.wait_resolved("rough", 2)[1]
        assert grown["action"]["kind"] == "scale_up"
        assert run.wait_end("rough")["phase"] == "completed"

    before, after = losses(calm), losses(rough)
    assert before.keys() == after.keys()
    assert max(abs(before[step] - after[step]) for step in before) < CLOSE
