"""A torchrun script without Holdfast: DDP, and its own checkpoint with torch.save.

torchrun --nproc-per-node 2 train_ddp.py --checkpoint /tmp/ddp.pt
holdfast run --nnodes 2 --nproc-per-node 1 train_ddp.py --checkpoint /tmp/ddp.pt
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--batch", type=int, default=32, help="samples per rank and step")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    return parser.parse_args()


def save(path: Path, **state: object) -> None:
    """Write under a temporary name and rename, so that a kill leaves the previous checkpoint intact."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def train(args: argparse.Namespace) -> None:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    rank = dist.get_rank()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
    model = DistributedDataParallel(network, device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    step = 0
    if args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < args.steps:
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        x = torch.randn(args.batch, 32, generator=generator).to(device)
        loss = mse_loss(model(x), x.square().sum(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % args.save_every == 0:
            save(args.checkpoint, model=network.state_dict(), optimizer=optimizer.state_dict(), step=step)
            print(f"step {step}  loss {loss.item():.4f}", flush=True)


def main() -> None:
    args = parse_arguments()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(args)
    # Only after the model is deleted: if it were the last object that holds the group, torch 2.13 and gloo's thread could wait
    # for each other.
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
