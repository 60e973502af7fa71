"""torch's own tutorial, "Getting started with Distributed Checkpoint": FSDP2, `dcp.async_save`, `dcp.load`; with a data loader.

    torchrun --nproc-per-node 2 dcp_fsdp.py                    as it is: saves are directories below checkpoint/
    holdfast run --local --nproc-per-node 2 dcp_fsdp.py        the same calls go through memory, disk, peer and object store

Needs torchdata. Prints a hash of the final weights.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import holdfast.train as hf
from holdfast.integrations.dcp import Reader, Writer
from holdfast.integrations.loaders import PerRank

CHECKPOINT = "checkpoint"
SAMPLES, BATCH = 512, 8


class AppState(Stateful):
    """Model and optimizer, as in the tutorial."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(16, 16)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(0.1)
        self.net2 = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net2(self.dropout(self.relu(self.net1(x))))
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--save-every", type=int, default=20, help="outside of Holdfast, which has an interval of its own"
    )
    parser.add_argument("--step-s", type=float, default=0.0, help="so long a step takes at least, to look at faults")
    args = parser.parse_args()

    run = hf.attach()
    torch.manual_seed(0)
    model = ToyModel()
    fully_shard(model, mesh=init_device_mesh(run.device.type, (dist.get_world_size(),)))
    torch.manual_seed(dist.get_rank())  # dropout differs between ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    made = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.rand(SAMPLES, 16, generator=made), torch.rand(SAMPLES, 8, generator=made))
    sampler = StatefulDistributedSampler(dataset, drop_last=True)
    loader = StatefulDataLoader(dataset, BATCH, sampler=sampler, drop_last=True)

    state = {"app": AppState(model, optimizer), "data": PerRank(loader, run.world)}
    saving = dist.new_group(backend="gloo")  # of the background saves: training's collectives are not disturbed
    writer = Writer(run) if run.saves else None
    reader = Reader(run)
    if reader.available:
        dcp.load(state, storage_reader=reader)
    step, pending = run.steps_finished, None
    while step < args.steps:
        sampler.set_epoch(step // len(loader))
        batches = iter(loader)
        run.reapply_rng()  # making the iterator has drawn a number
        for x, y in batches:
            with run.step(step) as s:
                time.sleep(args.step_s)
                loss = nn.functional.mse_loss(model(x.to(run.device)), y.to(run.device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                s.log(loss=loss)
            step += 1
            if writer.due if writer is not None else step % args.save_every == 0:
                if pending is not None:
                    pending.result()
                pending = dcp.async_save(
                    state, checkpoint_id=f"{CHECKPOINT}/step-{step}", storage_writer=writer, process_group=saving
                )
            if dist.get_rank() == 0 and step % 20 == 0:
                print(f"step {step}  loss {loss.item():.4f}", flush=True)
            if step >= args.steps:
                break
    if pending is not None:
        pending.result()
    full = [value.full_tensor() for value in get_model_state_dict(model).values()]
    if dist.get_rank() == 0:
        digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in full)).hexdigest()
        print(f"weights {digest[:16]}", flush=True)
    run.close()


if __name__ == "__main__":
    main()
