"""The MLP with Hugging Face Trainer. Its own resume: `resume_from_checkpoint`."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from mlp import BATCH, Progress, arguments, model, samples  # type: ignore[import-not-found]
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from holdfast.integrations.transformers import attach


class Reconstruction(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs: torch.Tensor = self.layers(inputs)
        return {"loss": torch.nn.functional.mse_loss(outputs, inputs), "outputs": outputs}


class Steps(TrainerCallback):  # type: ignore[misc]
    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._progress.finished(state.global_step)


def main(options: argparse.Namespace) -> None:
    own = options.out / "own"
    args = TrainingArguments(
        output_dir=str(own),
        max_steps=options.steps,
        per_device_train_batch_size=BATCH,
        save_strategy="steps" if options.save_every else "no",
        save_steps=options.save_every or 500,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        use_cpu=True,
    )
    trainer = Trainer(
        model=Reconstruction(),
        args=args,
        train_dataset=[{"inputs": each} for (each,) in samples()],
        callbacks=[Steps(Progress(options.out))],
    )
    attach(trainer)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(own)) if own.exists() else None)


if __name__ == "__main__":
    main(arguments())
