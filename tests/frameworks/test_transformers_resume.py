"""Trainer, interrupted anywhere and restored, in one process: the weights, the logged losses and the order of data are those of
an undisturbed training, bit for bit. No services, a world of one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("default")]
transformers = pytest.importorskip("transformers", reason="transformers is not installed: make frameworks-test")

import torch  # noqa: E402

import holdfast.train as hf  # noqa: E402
from holdfast.domain.errors import Conflict, IncompatibleVersion, InvalidSpec  # noqa: E402
from holdfast.integrations import transformers as integration  # noqa: E402

VOCABULARY, LENGTH, SAMPLES = 32, 8, 44


class Killed(Exception):
    """In place of a SIGKILL: nothing of the process is used afterwards but the images of its state."""


class Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index >= SAMPLES:
            raise IndexError(index)  # ends an iteration, as by the sampler that groups by length
        self.seen.append(index)
        tokens = (index + torch.arange(LENGTH - index % 3)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    width = max(len(each["input_ids"]) for each in samples)
    return {
        name: torch.stack([torch.nn.functional.pad(each[name], (0, width - len(each[name]))) for each in samples])
        for name in ("input_ids", "labels")
    }


class KillAt(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
    def __init__(self, event: str, step: int) -> None:
        self._step = step
        setattr(self, event, self._strike)

    def _strike(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise Killed


def trainer(out: Path, *callbacks: Any, **changes: Any) -> Any:
    torch.manual_seed(0)
    size = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 2}
    arguments = {
        "output_dir": str(out),
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,  # 11 batches of an epoch: the last step of an epoch has one
        "learning_rate": 1e-2,
        "logging_steps": 4,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        **changes,
    }
    return transformers.Trainer(
        model=transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0)),
        args=transformers.TrainingArguments(**arguments),
        train_dataset=Words(),
        eval_dataset=Words(),
        data_collator=collate,
        callbacks=list(callbacks),
    )


def summary(trained: Any) -> tuple[str, list[dict[str, float]]]:
    """The hash of the weights, and what was logged but for times."""
    weights = b"".join(value.numpy().tobytes() for value in trained.model.state_dict().values())
    logged = [
        {key: value for key, value in entry.items() if not key.endswith(("_runtime", "_per_second"))}
        for entry in trained.state.log_history
    ]
    return hashlib.sha256(weights).hexdigest(), logged


@pytest.fixture
def checkpoint(tmp_path: Path) -> hf.Checkpoints:
    return hf.Checkpoints(directory=tmp_path / "ckpt", interval_steps=1, memory=tmp_path / "memory")


Train = Callable[..., Any]


@pytest.fixture
def train(tmp_path: Path, checkpoint: hf.Checkpoints) -> Train:
    """Attach, train to the end or to `Killed`, and close as the exit of the process would."""

    def run(*callbacks: Any, **changes: Any) -> Any:
        training = trainer(tmp_path / "out", *callbacks, **changes)
        handle = integration.attach(training, checkpoint=checkpoint)
        try:
            training.train()
        except Killed as error:
            handle.close(error)
            raise
        handle.close()
        return training

    return run


def undisturbed(tmp_path: Path, *callbacks: Any, **changes: Any) -> tuple[str, list[dict[str, float]]]:
    calm = trainer(tmp_path / "calm", *callbacks, **changes)
    calm.train()
    return summary(calm)


EVERY_EPOCH = {"eval_strategy": "epoch"}
BY_LENGTH = {"train_sampling_strategy": "group_by_length"}


@pytest.mark.parametrize(
    ("event", "step", "changes"),
    [
        ("on_substep_end", 4, {}),  # within the accumulation of step 5
        ("on_step_begin", 6, EVERY_EPOCH),  # the second epoch has begun
        ("on_evaluate", 6, EVERY_EPOCH),  # at the end of the first epoch, before its state is saved
        ("on_step_end", 9, {"eval_strategy": "steps", "eval_steps": 3}),
        ("on_substep_end", 8, BY_LENGTH),  # the order of data comes from the global generators
        ("on_substep_end", 13, {"dataloader_num_workers": 1, "eval_strategy": "epoch"}),
        ("on_train_end", 18, EVERY_EPOCH),  # all steps are done
        ("on_train_end", 8, {"max_steps": 8}),  # in the middle of an epoch
        ("on_substep_end", 9, {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2}),
    ],
)
def test_a_restored_training_ends_as_an_undisturbed_one(
    tmp_path: Path, train: Train, event: str, step: int, changes: dict[str, Any]
) -> None:
    expected = undisturbed(tmp_path, **changes)
    with pytest.raises(Killed):
        train(KillAt(event, step), **changes)
    assert summary(train(**changes)) == expected


def test_several_kills_and_a_longer_interval(tmp_path: Path, train: Train, checkpoint: hf.Checkpoints) -> None:
    object.__setattr__(checkpoint, "interval_steps", 4)
    expected = undisturbed(tmp_path, **EVERY_EPOCH)
    for step in (3, 7, 7, 13):
        with pytest.raises(Killed):
            train(KillAt("on_substep_end", step), **EVERY_EPOCH)
    assert summary(train(**EVERY_EPOCH)) == expected


def test_early_stopping_keeps_its_patience_and_its_verdict(tmp_path: Path, train: Train) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss", "learning_rate": 0.0}

    def stopping() -> Any:
        return transformers.EarlyStoppingCallback(early_stopping_patience=3)

    expected = undisturbed(tmp_path, stopping(), **changes)
    assert expected[1][-1]["step"] == 8
    for event, step in (("on_substep_end", 4), ("on_train_end", 8)):
        with pytest.raises(Killed):
            train(stopping(), KillAt(event, step), **changes)
    assert summary(train(stopping(), **changes)) == expected


def test_no_sample_is_skipped_or_repeated_by_what_is_trained(tmp_path: Path, train: Train) -> None:
    calm = trainer(tmp_path / "calm", num_train_epochs=1)
    calm.train()
    with pytest.raises(Killed):
        train(KillAt("on_step_end", 3), num_train_epochs=1)
    restored = train(num_train_epochs=1)
    after = 2 * 2 * 4  # two steps were saved
    assert restored.train_dataset.seen[-(SAMPLES - after) :] == calm.train_dataset.seen[after:]


def test_own_checkpoints_are_left_alone(tmp_path: Path, train: Train) -> None:
    changes = {"save_strategy": "steps", "save_steps": 5}
    with pytest.raises(Killed):
        train(KillAt("on_step_end", 7), **changes)
    mine = tmp_path / "out" / "checkpoint-5"
    before = {path: path.read_bytes() for path in sorted(mine.iterdir())}
    assert json.loads((mine / "trainer_state.json").read_text())["global_step"] == 5
    train(**changes)
    assert {path: path.read_bytes() for path in sorted(mine.iterdir())} == before
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} == {
        "checkpoint-5",
        "checkpoint-10",
        "checkpoint-15",
        "checkpoint-18",
    }


def test_trainer_resumes_from_its_own_checkpoint_where_holdfast_has_none(tmp_path: Path, train: Train) -> None:
    expected = undisturbed(tmp_path, save_strategy="steps", save_steps=5)
    training = trainer(tmp_path / "out")
    handle = integration.attach(
        training, checkpoint=hf.Checkpoints(directory=tmp_path / "other", interval_steps=1, memory=tmp_path / "memory")
    )
    training.train(resume_from_checkpoint=str(tmp_path / "calm" / "checkpoint-10"))
    handle.close()
    assert summary(training)[0] == expected[0]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, "use_seedable_sampler"),
    ],
)
def test_what_would_repeat_samples_is_refused_by_name(train: Train, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidSpec, match=named):
        train(**changes)
    hf.attach().close()


def test_weights_outside_of_the_model_are_refused_unless_they_are_saved(
    tmp_path: Path, checkpoint: hf.Checkpoints
) -> None:
    """As of a loss with weights of its own. A restored run would continue with new ones."""

    def training(*callbacks: Any) -> tuple[Any, torch.nn.Linear]:
        made = trainer(tmp_path / "out", *callbacks)
        torch.manual_seed(len(callbacks))
        head = torch.nn.Linear(2, 1)
        made.optimizer = torch.optim.SGD([*made.model.parameters(), *head.parameters()], lr=1e-2)
        return made, head

    refused, _ = training()
    run = integration.attach(refused, checkpoint=checkpoint)
    with pytest.raises(InvalidSpec, match=r"2 parameters that are not the model's.*state="):
        refused.train()
    run.close(Killed())
    killed, head = training(KillAt("on_step_end", 3))
    run = integration.attach(killed, state={"loss": head}, checkpoint=checkpoint)
    with pytest.raises(Killed):
        killed.train()
    run.close(Killed())
    resumed, restored = training()
    with integration.attach(resumed, state={"loss": restored}, checkpoint=checkpoint):
        resumed.train()
    assert torch.equal(restored.weight, head.weight), "it has no gradient, so it stays as it was"


def test_another_batch_size_than_the_checkpoints_is_refused(train: Train) -> None:
    with pytest.raises(Killed):
        train(KillAt("on_step_end", 3))
    with pytest.raises(
        InvalidSpec, match="per_device_train_batch_size: 2 is not valid; expected 4 as in the checkpoint"
    ):
        train(per_device_train_batch_size=2)
    hf.attach().close(Killed())


def test_other_internals_are_refused_by_name(tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(integration.SIGNATURES, "_run_epoch", ("model", "data"))
    monkeypatch.setitem(integration.SIGNATURES, "_inner_loop", ())
    with pytest.raises(
        IncompatibleVersion, match=r"Trainer\._run_epoch takes .*not \(model, data\); Trainer\._inner_loop"
    ):
        train()
    hf.attach().close()


def test_twice_attached_and_something_else_attached(tmp_path: Path, checkpoint: hf.Checkpoints) -> None:
    training = trainer(tmp_path / "out")
    with integration.attach(training, checkpoint=checkpoint):
        with pytest.raises(Conflict, match="attached already"):
            integration.attach(training)
        with pytest.raises(InvalidSpec, match=r"expected a transformers\.Trainer"):
            integration.attach(object())


def test_without_holdfast_a_trainer_is_left_as_it_is(tmp_path: Path) -> None:
    training = trainer(tmp_path / "out", max_steps=1)
    with integration.attach(training) as run:
        assert run.inert
        assert "_run_epoch" not in vars(training)
        training.train()


def test_a_trainer_that_uses_no_other_rank_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = trainer(tmp_path / "out")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidSpec, match=r"TrainingArguments\.world_size: 1 .* 2, the number of ranks"):
        integration._require_exact(alone)
