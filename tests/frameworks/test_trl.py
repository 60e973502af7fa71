"""Trainers of TRL, which build on Trainer: interrupted after any step and restored in one process, the weights are those of an
undisturbed training, bit for bit. No services, a world of one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("default")]
trl = pytest.importorskip("trl", reason="TRL is not installed: make frameworks-test")

import torch  # noqa: E402
import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402

import holdfast.train as hf  # noqa: E402
from holdfast.domain.errors import InvalidSpec  # noqa: E402
from holdfast.integrations.transformers import attach  # noqa: E402

WORDS = [f"w{index}" for index in range(20)]
VOCABULARY = {word: index for index, word in enumerate(["<pad>", "<eos>", *WORDS])}
STEPS = 8


class Killed(Exception):
    """In place of a SIGKILL."""


class KillAfter(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise Killed


def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>", padding_side="left"
    )


def texts(length: int) -> list[str]:
    drawn = torch.randint(len(WORDS), (40, length), generator=torch.Generator().manual_seed(1)).tolist()
    return [" ".join(WORDS[each] for each in row) for row in drawn]


def trainer(kind: str, out: Path, *callbacks: Any, **changes: Any) -> Any:
    transformers.set_seed(0)
    size = {"vocab_size": len(VOCABULARY), "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**size, bos_token_id=1, eos_token_id=1, pad_token_id=0)
    )
    arguments = {
        "output_dir": str(out),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        **changes,
    }
    shared = {"model": model, "processing_class": tokenizer(), "callbacks": list(callbacks)}
    if kind == "sft":
        dataset = Dataset.from_dict({"text": texts(9)})
        return trl.SFTTrainer(args=trl.SFTConfig(**arguments, max_length=16), train_dataset=dataset, **shared)
    return trl.GRPOTrainer(
        args=trl.GRPOConfig(**arguments, num_generations=4, max_completion_length=6),
        reward_funcs=lambda completions, **_: [float(len(set(each.split()))) for each in completions],
        train_dataset=Dataset.from_dict({"prompt": texts(4)}),
        **shared,
    )


def weights(trained: Any) -> str:
    return hashlib.sha256(
        b"".join(value.numpy().tobytes() for value in trained.model.state_dict().values())
    ).hexdigest()


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_a_restored_training_is_the_undisturbed_one(kind: str, tmp_path: Path) -> None:
    calm = trainer(kind, tmp_path / "calm")
    calm.train()
    for step in (2, 5, STEPS):  # it is not saved yet: the one before is
        at = tmp_path / str(step)
        checkpoint = hf.Checkpoints(directory=at / "ckpt", interval_steps=1, memory=at / "memory")
        killed = trainer(kind, at / "out", KillAfter(step))
        handle = attach(killed, checkpoint=checkpoint)
        with pytest.raises(Killed):
            killed.train()
        handle.close(Killed())
        restored = trainer(kind, at / "out")
        handle = attach(restored, checkpoint=checkpoint)
        restored.train()
        handle.close()
        assert handle.restore_step == step - 1
        assert weights(restored) == weights(calm), f"after a kill at step {step}"


def test_rollouts_of_several_steps_are_refused(tmp_path: Path) -> None:
    """They are not part of a checkpoint: samples would be skipped and repeated."""
    checkpoint = hf.Checkpoints(directory=tmp_path / "ckpt", interval_steps=1, memory=tmp_path / "memory")
    with pytest.raises(
        InvalidSpec, match=r"num_iterations.*4 is not valid; expected a divisor of gradient_accumulation"
    ):
        attach(trainer("grpo", tmp_path / "out", num_iterations=2), checkpoint=checkpoint)
    hf.attach().close()
