"""Sharded state under the whole stack: a crash leaves no trace, and a resize puts the shards of lost ranks together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training import cluster, losses

from holdfast.cli.demo.scenario import examples

STEPS = 150  # of the calm run; the rough one goes on until it has been through everything


def fsdp_job(name: str, out: Path, steps: int) -> dict[str, Any]:
    return {
        "name": name,
        "script": str(examples() / "fsdp" / "train.py"),
        "args": ["--steps", str(steps), "--layers", "2", "--width", "32", "--seq", "32", "--global-batch", "8",
                 "--out", str(out)],
        "nodes": 2,
        "nproc_per_node": 1,
        "mesh": {"dp": 2},
        "elastic": {"min_dp": 1, "max_dp": 2},
        "checkpoint": {"interval_steps": 5, "keep": 2},
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_crash_is_bit_exact_and_a_resize_reshards(tmp_path: Path) -> None:
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    with cluster(tmp_path / "stack", nodes=2) as run:
        run.client.submit(fsdp_job("calm", calm, STEPS))
        assert run.wait_end("calm")["phase"] == "completed"

        run.client.submit(fsdp_job("rough", rough, 1_000_000))
        run.wait_step("rough", 12)
        run.inject.crash("rough", 1)
        run.wait_resolved("rough", 1)
        crashed_at = run.wait_step("rough", 30)["step"]
        exact = losses(rough)
        lost = run.node_of("rough", 1)
        run.inject.node_loss(lost)
        run.wait("rough", "one rank", lambda view: view["phase"] == "running" and len(view["ranks"]) == 1)
        run.inject.node_return(lost)
        view = run.wait("rough", "two ranks", lambda view: view["phase"] == "running" and len(view["ranks"]) == 2)
        run.wait_step("rough", view["step"] + 10)
        actions = [incident["action"]["kind"] for incident in run.wait_resolved("rough", 2)]

    expected, got = losses(calm), losses(rough)
    before = range(1, min(crashed_at, STEPS))
    assert {step: exact[step] for step in before} == {step: expected[step] for step in before}, "bit for bit"
    assert actions[:2] == ["restart", "scale_down"]
    assert set(got) == set(range(1, max(got) + 1))
    common = {step: loss for step, loss in got.items() if step <= STEPS}
    assert common == pytest.approx(expected, rel=1e-3), "sums in another order round differently, and no more"
