"""Hugging Face Trainer: a small causal language model on synthetic text, with the one line of Holdfast.

    holdfast run --local --nproc-per-node 2 examples/frameworks/hf_trainer.py
    torchrun --nproc-per-node 2 examples/frameworks/hf_trainer.py       # the same training without Holdfast

Nothing is downloaded: the model is built from a configuration."""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from holdfast.integrations.transformers import attach

VOCABULARY, LENGTH = 64, 16


class Counting(torch.utils.data.Dataset):
    """Sequences that count upwards, from a start and by a stride."""

    def __init__(self, samples: int, sample_s: float = 0.0) -> None:
        self.samples = samples
        self.sample_s = sample_s  # how long loading one takes: for experiments

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.sample_s)
        tokens = (index + torch.arange(LENGTH) * (1 + index % 7)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**size, bos_token_id=0, eos_token_id=0))


def train(options: argparse.Namespace, callbacks: Sequence[TrainerCallback] = ()) -> None:
    args = TrainingArguments(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=options.accumulation,
        learning_rate=1e-3,
        warmup_steps=10,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=25,
        save_strategy="no",  # Holdfast saves; Trainer may as well
        report_to="none",
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=model(),
        args=args,
        train_dataset=Counting(240, options.sample_s),
        eval_dataset=Counting(8),
        callbacks=list(callbacks),
    )
    attach(trainer)  # the one line
    trainer.train()

    if trainer.is_world_process_zero():
        weights = b"".join(value.cpu().numpy().tobytes() for value in trainer.model.state_dict().values())
        digest = hashlib.sha256(weights).hexdigest()
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "weights.sha256").write_text(digest + "\n")
        trainer.state.save_to_json(str(options.out / "trainer_state.json"))
        print(f"step {trainer.state.global_step}  weights {digest[:16]}")


def main() -> None:
    train(arguments().parse_args())


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--accumulation", type=int, default=2, help="batches per step")
    parser.add_argument("--sample-s", type=float, default=0.0, help="seconds that loading a sample takes")
    parser.add_argument("--out", type=Path, default=Path("out/hf_trainer"))
    return parser


if __name__ == "__main__":
    main()
