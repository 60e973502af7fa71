"""Sharded state (FSDP2) under the whole stack: a crash leaves no trace, a resize puts the shards of lost ranks together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from losses import losses
from training import cluster

from holdfast.cli.demo.course import examples

ENDLESS = 1_000_000


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
        "checkpoint": {"interval_steps": 20, "keep": 2},  # peers keep up on a busy machine: one step has all copies
    }  # fmt: skip


@pytest.mark.slow
def test_a_crash_is_bit_exact_and_a_resize_reshards(tmp_path: Path) -> None:
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    with cluster(tmp_path / "stack", nodes=2) as run:
        run.client.submit(fsdp_job("rough", rough, ENDLESS))
        run.wait_step("rough", 12)
        run.inject.crash("rough", 1)
        run.wait_resolved("rough", 1)
        run.wait_step("rough", 30)
        exact = losses(rough)
        lost = run.node_of("rough", 1)
        saved = run.saved_step("rough", without=lost)
        run.inject.node_loss(lost)
        smaller = run.wait(
            "rough", "one replica", lambda view: view["phase"] == "running" and view["mesh"] == {"dp": 1}
        )
        run.wait_step("rough", smaller["step"] + 10)
        run.inject.node_return(lost)
        grown = run.wait("rough", "two replicas", lambda view: view["phase"] == "running" and view["mesh"] == {"dp": 2})
        run.wait_step("rough", grown["step"] + 10)
        incidents = run.wait_resolved("rough", 2)
        run.client.stop("rough", "seen enough")
        run.wait_end("rough")
        got = losses(rough)

        # The run without faults, as far as the other one came: what is compared goes through all of it.
        run.client.submit(fsdp_job("calm", calm, max(got)))
        assert run.wait_end("calm")["phase"] == "completed"

    expected = losses(calm)
    assert [incident["action"]["kind"] for incident in incidents[:2]] == ["restart", "scale_down"]
    assert incidents[1]["restored_step"] >= saved
    assert exact == {step: expected[step] for step in exact}, "bit for bit"
    assert got == pytest.approx(expected, rel=1e-3), "sums in another order round differently, and no more"
