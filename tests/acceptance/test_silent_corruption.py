"""A flipped bit in one replica's weights: the node is named and replaced, and the run ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training import cluster

STEPS = 300
FLIPPED_AT = 62
EVERY = 5

SCRIPT = """
import sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import holdfast.train as hf

def main(run):
    out, flip_at, pause_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    step = run.restore(state)
    while step < STEPS:
        with run.step(step) as s:
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1000 * step + run.rank))
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            s.log(loss=loss, local_grad_norm=torch.cat([p.grad.flatten() for p in model.parameters()]).norm(), tokens=8)
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= run.world_size
            optimizer.step()
            marker = out / "flipped"
            if step == flip_at and run.rank == 1 and not marker.exists():
                marker.touch()
                model[0].weight.data.view(torch.int32)[3, 5] ^= 1 << 9  # about a thousandth of one weight
            time.sleep(pause_s)
        step += 1
        run.checkpoint(state, step)
    torch.save(model.state_dict(), out / f"rank-{run.rank}.pt")

hf.launch(main)
""".replace("STEPS", str(STEPS))


def job(name: str, directory: Path, flip_at: int, pause_s: float) -> dict[str, Any]:
    script, out = directory / "train.py", directory / name
    script.write_text(SCRIPT)
    out.mkdir()
    return {
        "name": name,
        "script": str(script),
        "args": [str(out), str(flip_at), str(pause_s)],
        "nodes": 3,
        "nproc_per_node": 1,
        "mesh": {"dp": 3},
        "checkpoint": {"interval_steps": EVERY, "keep": 8},
        "checks": {"replica_every_steps": EVERY},
    }


@pytest.mark.slow
def test_a_flipped_bit_costs_its_node_and_leaves_no_trace(tmp_path: Path) -> None:
    with cluster(tmp_path / "stack", nodes=4) as run:
        run.client.submit(job("calm", tmp_path, -1, 0.0))
        assert run.wait_end("calm")["phase"] == "completed"
        run.client.submit(job("rough", tmp_path, FLIPPED_AT, 0.03))
        run.wait_step("rough", 10)
        sick = run.node_of("rough", 1)
        (incident,) = run.wait_resolved("rough", 1)
        assert run.wait_end("rough")["phase"] == "completed"
        cordoned = run.client.node(sick)
    assert (incident["kind"], incident["node"], incident["action"]["kind"]) == ("silent_corruption", sick, "hot_swap")
    assert incident["restored_step"] <= FLIPPED_AT - FLIPPED_AT % EVERY
    assert (cordoned["state"], "differ" in cordoned["reason"]) == ("cordoned", True)
    weights = [torch.load(tmp_path / name / f"rank-{rank}.pt") for name in ("calm", "rough") for rank in range(3)]
    for other in weights[1:]:
        assert all(torch.equal(weights[0][name], other[name]) for name in weights[0])
