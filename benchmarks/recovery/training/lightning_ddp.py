"""The MLP with Lightning. Its own resume: `ModelCheckpoint(save_last=True)` and `ckpt_path="last"`."""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning as L  # noqa: N812
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from mlp import BATCH, Progress, arguments, model, samples  # type: ignore[import-not-found]


class Reconstruction(L.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Steps(Callback):  # type: ignore[misc]
    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self._progress.finished(trainer.global_step)


def main(options: argparse.Namespace) -> None:
    callbacks: list[Callback] = [Steps(Progress(options.out))]
    if options.save_every:
        callbacks.append(
            ModelCheckpoint(options.out / "own", every_n_train_steps=options.save_every, save_top_k=1, save_last=True)
        )
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_steps=options.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=bool(options.save_every),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    loader = torch.utils.data.DataLoader(samples(), BATCH, shuffle=True)
    trainer.fit(Reconstruction(), loader, ckpt_path="last" if options.save_every else None)


if __name__ == "__main__":
    main(arguments())
