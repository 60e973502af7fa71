"""Restarts and swaps leave no trace: every loss and the final weights are those of the uninterrupted run, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from training import cluster, gpt_job, losses

STEPS = 400  # the run must outlast the news of it: steps are told once a second


def weights(out: Path) -> dict[str, torch.Tensor]:
    return {
        f"{path.stem}.{name}": tensor
        for path in sorted(out.glob("stage-*.pt"))
        for name, tensor in torch.load(path).items()
    }


@pytest.mark.timeout(240)
def test_losses_and_weights_are_bit_identical_after_restarts_and_a_swap(tmp_path: Path) -> None:
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    with cluster(tmp_path / "stack", nodes=5) as run:
        run.client.submit(gpt_job("calm", calm, dp=2, pp=2, steps=STEPS))
        assert run.wait_end("calm")["phase"] == "completed"

        run.client.submit(gpt_job("rough", rough, dp=2, pp=2, steps=STEPS))
        run.wait_step("rough", 8)
        run.inject.crash("rough", 1)
        run.wait_resolved("rough", 1)
        run.wait_step("rough", 22)
        lost = run.node_of("rough", 2)
        run.inject.node_loss(lost)
        run.wait_resolved("rough", 2)
        run.wait_step("rough", 38)
        run.inject.crash("rough", 0)
        incidents = run.wait_resolved("rough", 3)
        assert run.wait_end("rough")["phase"] == "completed"

    assert [incident["action"]["kind"] for incident in incidents] == ["restart", "hot_swap", "restart"]
    assert incidents[1]["node"] == lost
    assert all(incident["rework_steps"] <= 2 * 5 for incident in incidents)
    assert losses(calm) == losses(rough)
    assert set(losses(calm)) == set(range(1, STEPS + 1))
    before, after = weights(calm), weights(rough)
    assert before.keys() == after.keys()
    assert before
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
