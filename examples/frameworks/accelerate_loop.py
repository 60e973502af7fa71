"""Accelerate's own "Quicktour": a training loop over what `accelerator.prepare` returns, on synthetic data.

    torchrun --nproc-per-node 2 accelerate_loop.py
    holdfast run --local --nproc-per-node 2 accelerate_loop.py

Prints a hash of the final weights.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.accelerate import attach


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-s", type=float, default=0.0, help="so long a batch takes at least, to look at faults")
    parser.add_argument("--accumulate", type=int, default=2, help="batches per step")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=args.accumulate)
    set_seed(0)
    made = torch.Generator().manual_seed(1)
    dataset = TensorDataset(torch.rand(512, 32, generator=made), torch.randint(0, 4, (512,), generator=made))
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * args.steps)
    loader = DataLoader(dataset, 8, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    set_seed(accelerator.process_index)  # dropout differs between ranks

    run = attach(accelerator)
    while run.steps_finished < args.steps:
        for inputs, targets in run.batches(loader):
            with run.step() as step, accelerator.accumulate(model):
                time.sleep(args.step_s)
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step.log(loss=loss)
            if accelerator.is_main_process and accelerator.sync_gradients and run.steps_finished % 10 == 0:
                print(f"step {run.steps_finished}  loss {loss.item():.4f}", flush=True)
            if run.steps_finished >= args.steps:
                break
    if accelerator.is_main_process:
        weights = b"".join(value.cpu().numpy().tobytes() for value in accelerator.get_state_dict(model).values())
        print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
