"""Lightning's own example, "Lightning in 15 minutes", on synthetic images. Nothing in it is about Holdfast.

    torchrun --nproc-per-node 2 lightning_autoencoder.py
    holdfast run --local --nproc-per-node 2 lightning_autoencoder.py

Prints a hash of the final weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time

import lightning as L  # noqa: N812
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class LitAutoEncoder(L.LightningModule):
    def __init__(self, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s
        self.encoder = nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 28 * 28))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.step_s)
        x = batch[0].view(batch[0].size(0), -1)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss)
        if self.trainer.is_global_zero and self.global_step % 10 == 0:
            print(f"step {self.global_step}  loss {loss.item():.4f}", flush=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x = batch[0].view(batch[0].size(0), -1)
        self.log("val_loss", nn.functional.mse_loss(self.decoder(self.encoder(x)), x), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-s", type=float, default=0.0, help="so long a step takes at least, to look at faults")
    args = parser.parse_args()

    L.seed_everything(0)
    made = torch.Generator().manual_seed(1)
    train = TensorDataset(torch.rand(560, 1, 28, 28, generator=made))
    valid = TensorDataset(torch.rand(64, 1, 28, 28, generator=made))
    autoencoder = LitAutoEncoder(args.step_s)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        max_steps=args.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(autoencoder, DataLoader(train, 16, shuffle=True), DataLoader(valid, 16))
    if trainer.is_global_zero:
        weights = b"".join(value.numpy().tobytes() for value in autoencoder.state_dict().values())
        print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
