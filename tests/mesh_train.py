"""A tiny model over pipeline, tensor and data parallelism, in whatever order the mesh has them. One weight per stage.

    mesh_train.py --steps 100 --out DIR [--pause-s 0.02]

Every step moves activations between stages, sums over tensor-parallel ranks and reduces gradients over the replicas. Each share
of the weights is different: a rank that continues with the shard of other coordinates changes the losses.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import holdfast.train as hf

WIDTH = 16
SAMPLES = 240
GLOBAL_BATCH = 12
MICRO_BATCH = 2


class Stage(torch.nn.Module):
    """This rank's rows of its stage's weight, and how its activations and gradients reach the other stages."""

    def __init__(self, run: hf.Run) -> None:
        super().__init__()
        world = run.world
        self.index, self.count = world.index("pp"), world.size("pp")
        rows = WIDTH // world.size("tp")
        self.mine = slice(world.index("tp") * rows, (world.index("tp") + 1) * rows)
        generator = torch.Generator().manual_seed(self.index)
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator)[self.mine] / 2)
        self.tensor, self.pipeline = (run.mesh[name].get_group() for name in ("tp", "pp"))

    def micro_batch(self, sample: Tensor) -> Tensor:
        """Add the gradients of the batch's loss to the weight's. Returns the summed loss, which is 0 before the last stage."""
        x = sample
        if self.index:
            dist.recv(x := torch.empty_like(sample), group=self.pipeline, group_src=self.index - 1)
        x.requires_grad_()
        part = x[:, self.mine] @ self.weight
        summed = part.detach().clone()
        dist.all_reduce(summed, group=self.tensor)
        out = torch.tanh(summed.requires_grad_())
        loss = torch.zeros(())
        if self.index == self.count - 1:
            loss = (out - sample.detach().roll(1, 1)).square().sum()
            torch.autograd.backward(loss / GLOBAL_BATCH)
        else:
            dist.send(out.detach(), group=self.pipeline, group_dst=self.index + 1)
            dist.recv(gradient := torch.empty_like(out), group=self.pipeline, group_src=self.index + 1)
            torch.autograd.backward(out, gradient)
        torch.autograd.backward(part, summed.grad)
        assert x.grad is not None
        dist.all_reduce(x.grad, group=self.tensor)
        if self.index:
            dist.send(x.grad, group=self.pipeline, group_dst=self.index - 1)
        return loss.detach()


def main(run: hf.Run, steps: int, out: Path, pause_s: float) -> None:
    torch.set_num_threads(1)
    stage, replicas = Stage(run), run.mesh["dp"].get_group()
    optimizer = torch.optim.AdamW([stage.weight], lr=1e-3)
    samples = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(99))
    data = hf.ElasticSampler(SAMPLES, global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, world=run.world)
    state: dict[str, Any] = {"model": stage, "optimizer": optimizer, "data": data}
    writes = run.world.index("pp") == run.world.size("pp") - 1 and run.world.index("tp") == run.world.dp_index == 0
    step = run.restore(state)
    while step < steps:
        with run.step(step) as s:
            optimizer.zero_grad()
            loss = sum((stage.micro_batch(samples[indices]) for indices in next(data)), torch.zeros(()))
            assert stage.weight.grad is not None
            dist.all_reduce(stage.weight.grad, group=replicas)
            dist.all_reduce(loss, group=replicas)
            optimizer.step()
            time.sleep(pause_s)  # as if a device worked meanwhile
            s.log(loss=loss / GLOBAL_BATCH)
        step += 1
        if writes:
            out.mkdir(parents=True, exist_ok=True)
            with (out / "loss.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
        run.checkpoint(state, step)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pause-s", type=float, default=0.0, help="in each step")
    options = parser.parse_args()
    hf.launch(lambda run: main(run, options.steps, options.out, options.pause_s))
