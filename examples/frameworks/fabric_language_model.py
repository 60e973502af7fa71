"""Lightning Fabric's own example of a loop, "Convert PyTorch code to Fabric", with a small language model on synthetic text.

    torchrun --nproc-per-node 2 fabric_language_model.py
    holdfast run --local --nproc-per-node 2 fabric_language_model.py

Prints a hash of the final weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time

import torch
import torch.nn.functional as F  # noqa: N812
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.fabric import attach

VOCABULARY, LENGTH = 64, 16


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.recurrent = nn.GRU(32, 32, batch_first=True)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.recurrent(self.embedding(tokens))
        out: torch.Tensor = self.head(self.dropout(hidden))
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-s", type=float, default=0.0, help="so long a batch takes at least, to look at faults")
    parser.add_argument("--accumulate", type=int, default=2, help="batches per step")
    args = parser.parse_args()

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=ranks // int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp" if ranks > 1 else "auto",
    )
    fabric.launch()
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randint(VOCABULARY, (256, LENGTH + 1), generator=torch.Generator().manual_seed(1)))
    module = LanguageModel()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=8, shuffle=True))
    torch.manual_seed(fabric.global_rank)  # dropout differs between ranks

    run = attach(fabric, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    batch = 0
    while run.steps_finished < args.steps:
        for (tokens,) in run.batches(loader):
            time.sleep(args.step_s)
            batch += 1
            with run.step() as step:
                accumulating = batch % args.accumulate != 0
                with fabric.no_backward_sync(model, enabled=accumulating):
                    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                    fabric.backward(loss)
                if not accumulating:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                step.log(loss=loss, tokens=tokens.numel())
            if fabric.is_global_zero and not accumulating and run.steps_finished % 10 == 0:
                print(f"step {run.steps_finished}  loss {loss.item():.4f}", flush=True)
            if run.steps_finished >= args.steps:
                break
    if fabric.is_global_zero:
        weights = b"".join(value.cpu().numpy().tobytes() for value in module.state_dict().values())
        print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)
    run.close()


if __name__ == "__main__":
    main()
