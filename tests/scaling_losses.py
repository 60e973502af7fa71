"""What a job of `scaling_train` has computed, and what it computes when nothing happens to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import scaling_train
import torch

import holdfast.train as hf
from holdfast.domain.mesh import Mesh


def records(out: Path) -> list[dict[str, Any]]:
    """A record per step, in the order in which they were done, of the job whose option `--out` this is."""
    path = out / "steps.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def undisturbed_losses(steps: int, replicas: int) -> list[float]:
    """Replica 0's loss of each step of a run that nothing happens to: `scaling_train` without processes."""
    batch = scaling_train.PER_REPLICA * replicas
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=scaling_train.BASE_LR, momentum=0.9)
    hf.scaling.linear(optimizer, batch=batch, reference_batch=scaling_train.REFERENCE_BATCH)
    scheduler = scaling_train.schedule(optimizer)
    mesh = Mesh.of({"dp": replicas})
    data = [
        hf.ElasticSampler(
            scaling_train.SAMPLES, global_batch=batch, micro_batch=scaling_train.PER_REPLICA, world=hf.World(mesh, rank)
        )
        for rank in range(replicas)
    ]
    features = torch.randn(scaling_train.SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        gradients: list[torch.Tensor] = []
        for rank in range(replicas):
            (indices,) = next(data[rank])
            loss = (features[indices] @ weight).square().sum() / batch
            gradients += torch.autograd.grad(loss, [weight])
            if rank == 0:
                losses.append(float(loss.detach()))
        weight.grad = torch.stack(gradients).sum(dim=0)
        optimizer.step()
        scheduler.step()
    return losses
