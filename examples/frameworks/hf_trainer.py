"""Hugging Face Trainer: a small causal language model on synthetic text, with the one line of Holdfast.

    holdfast run --local --nproc-per-node 2 examples/frameworks/hf_trainer.py
    torchrun --nproc-per-node 2 examples/frameworks/hf_trainer.py       # the same training without Holdfast

Nothing is downloaded: the model is built from a configuration."""

from __future__ import annotations

import argparse
import hashlib
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from holdfast.integrations.transformers import attach

VOCABULARY, LENGTH = 64, 16


class Counting(torch.utils.data.Dataset):
    """Sequences that count upwards from a start and by a stride."""

    def __init__(self, samples: int, step_s: float) -> None:
        self.samples = samples
        self.step_s = step_s  # so long takes one sample: for experiments

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.step_s)
        tokens = (index + torch.arange(LENGTH) * (1 + index % 7)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--accumulation", type=int, default=2)
    options.add_argument("--eval-every", type=int, default=25)
    options.add_argument("--sample-s", type=float, default=0.0, help="seconds that loading a sample takes")
    options.add_argument("--out", type=Path, default=Path("out/hf_trainer"))
    chosen = options.parse_args()

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    args = TrainingArguments(
        output_dir=str(chosen.out),
        max_steps=chosen.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=chosen.accumulation,
        learning_rate=1e-3,
        warmup_steps=10,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=chosen.eval_every,
        save_strategy="no",  # Holdfast saves; Trainer may, too
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=Counting(240, chosen.sample_s),
        eval_dataset=Counting(8, 0.0),
    )
    attach(trainer)  # the one line
    trainer.train()

    if trainer.is_world_process_zero():
        weights = b"".join(value.cpu().contiguous().numpy().tobytes() for value in model.state_dict().values())
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / "weights.sha256").write_text(hashlib.sha256(weights).hexdigest() + "\n")
        trainer.state.save_to_json(str(chosen.out / "trainer_state.json"))
        print(f"step {trainer.state.global_step}  weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
