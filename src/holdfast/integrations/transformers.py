"""Hugging Face Trainer under Holdfast, in one line; what builds on it, such as TRL's SFTTrainer and GRPOTrainer, too.

    from holdfast.integrations.transformers import attach

    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    attach(trainer)
    trainer.train()

Theory. Trainer's loop is divided into methods that are replaced on this one trainer, each by a function that calls it:

* `_init_training_state` runs before model and optimizer are prepared, and needs the step: `run.restore_step`.
* `_prepare_for_training` has just made them: here the state is restored, where Trainer would load its own checkpoint.
* `_run_epoch` begins at the saved position: it skips batches as it does for Trainer's own checkpoints. The position is counted
  in updates of an epoch. The random number generators are set to the epoch's start first, since samplers may draw from them,
  and by `_load_rng_state`, which Trainer calls after the skip, to the saved step.
* `get_batch_samples` begins a step, `_maybe_log_save_evaluate` ends it. When it has logged, evaluated and written Trainer's own
  checkpoint, the state is saved; after the last step of an epoch, when the epoch's end has been worked off. So a restored run
  does again what had not been finished, and nothing else.

A step is one optimizer step, whatever the gradient accumulation. Trainer's own checkpoint files are not read, changed or
deleted; a restore of Holdfast takes precedence over `resume_from_checkpoint`.

Not bit-exact after a restore in the middle of an epoch: what a collator or a dataset draws from the *global* random number
generators while it makes a batch, because the data loader makes batches ahead."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
import transformers
from transformers.trainer_callback import ExportableState

import holdfast.train as hf
from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.domain.signals import Phase
from holdfast.integrations.tested import require_all_ranks, require_signatures, warn_if_untested
from holdfast.train.saves import optimizer_state, rng

log = logging.getLogger("holdfast.integrations")

TESTED: Final = ((5, 23), (5, 24))

SIGNATURES: Final = {
    "_init_training_state": (
        "max_steps",
        "num_update_steps_per_epoch",
        "num_train_epochs",
        "resume_from_checkpoint",
        "trial",
    ),
    "_prepare_for_training": ("max_steps", "train_dataloader", "resume_from_checkpoint"),
    "_run_epoch": (
        "model",
        "epoch",
        "train_dataloader",
        "steps_in_epoch",
        "num_update_steps_per_epoch",
        "trial",
        "ignore_keys_for_eval",
        "start_time",
        "resume_from_checkpoint",
        "epochs_trained",
        "steps_trained_in_current_epoch",
    ),
    "_load_rng_state": ("checkpoint",),
    "_maybe_log_save_evaluate": (
        "tr_loss",
        "grad_norm",
        "model",
        "trial",
        "epoch",
        "ignore_keys_for_eval",
        "start_time",
        "learning_rate",
    ),
    "_finalize_training": ("trial", "num_train_samples", "start_time"),
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "training_step": ("model", "inputs", "num_items_in_batch"),
}

# In place of the directory of a checkpoint: Trainer only asks whether it is None, and hands it to `_load_rng_state`.
RESTORED: Final = "restored by Holdfast"

# What this process computes anew from its arguments, as Trainer does when it resumes.
_NOT_RESTORED: Final = frozenset(
    {"is_local_process_zero", "is_world_process_zero", "max_steps", "num_train_epochs", "stateful_callbacks"}
)

_TOKEN_INPUTS: Final = ("input_ids",)  # a model's `main_input_name` whose elements are tokens


def attach(
    trainer: transformers.Trainer,
    *,
    state: Mapping[str, Any] | None = None,
    checkpoint: hf.Checkpoints | None = None,
) -> hf.Run:
    """Let `trainer.train()` report its steps, save its state and continue after a failure. Call it once, before `train`.

    `state`: more objects of the script that are part of a checkpoint, as in `run.checkpoint`. `checkpoint`: where checkpoints
    are written without an agent, as in `hf.attach`. Outside of Holdfast and without checkpoints, the trainer is left as it is.

    Raises `IncompatibleVersion` if this release of transformers has other internals, and `InvalidSpec` that names a training
    argument with which a run cannot continue exactly."""
    if not isinstance(trainer, transformers.Trainer):
        raise InvalidSpec("trainer", type(trainer).__qualname__, "a transformers.Trainer")
    run = hf.attach(checkpoint=checkpoint)
    if run.inert:
        return run
    if isinstance(getattr(trainer, "_run_epoch", None), _Replacement):
        raise Conflict("this trainer is attached already")
    require_signatures("transformers", {transformers.Trainer: SIGNATURES})
    warn_if_untested("transformers", TESTED)
    _require_exact(trainer)
    _Loop(trainer, run, state or {}).install()
    return run


def _require_exact(trainer: transformers.Trainer) -> None:
    """Refuse what would make a restored run skip or repeat samples, or leave state out."""
    args = trainer.args
    # TRL's trainers that generate: one generation serves so many batches. What is left of it after a step is in no checkpoint.
    batches = (getattr(args, "steps_per_generation", None) or 1) * getattr(args, "num_iterations", 1)
    refused: tuple[tuple[bool, str, object, str], ...] = (
        (args.ignore_data_skip, "ignore_data_skip", True, "False: a restored run must not repeat samples"),
        (args.auto_find_batch_size, "auto_find_batch_size", True, "False: the batch size is part of the data position"),
        (
            not args.accelerator_config.use_seedable_sampler,
            "accelerator_config.use_seedable_sampler",
            False,
            "True: the order of samples must not depend on earlier epochs of the process",
        ),
        (trainer.is_deepspeed_enabled, "deepspeed", args.deepspeed, "none: its state is not Trainer's"),
        (
            trainer.is_fsdp_enabled and getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2,
            "fsdp_config.fsdp_version",
            1,
            "2: the flat parameters of version 1 cannot be saved by shard",
        ),
        (
            args.gradient_accumulation_steps % batches != 0,
            "num_iterations * steps_per_generation",
            batches,
            f"a divisor of gradient_accumulation_steps ({args.gradient_accumulation_steps}): each optimizer step has to begin "
            "with a generation",
        ),
    )
    for wrong, name, value, expected in refused:
        if wrong:
            raise InvalidSpec(f"TrainingArguments.{name}", value, f"{expected} (holdfast.integrations.transformers)")
    require_all_ranks(
        "TrainingArguments.world_size", args.world_size, "Without GPUs, use TrainingArguments(use_cpu=True)"
    )


class _Replacement:
    """A method of one trainer, replaced. Holds no reference cycle that pickling a trainer would follow."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


@dataclasses.dataclass(slots=True)
class _Resumed:
    """What a checkpoint says about Trainer's loop, until the loop has taken it over."""

    epoch: int  # epochs that are finished
    updates: int  # finished in the next one
    epoch_rng: dict[str, Any] | None  # when that one began
    stopped: bool  # a callback had ended the training early
    tr_loss: torch.Tensor
    total_loss: float
    last_logged: int
    initial_step: int
    flos: float


class _Loop:
    """Trainer's loop as one stateful object: its `state_dict` is what a checkpoint holds of it."""

    def __init__(self, trainer: transformers.Trainer, run: hf.Run, state: Mapping[str, Any]) -> None:
        self._trainer = trainer
        self._run = run
        self._more = dict(state)
        self._state: dict[str, Any] = {}  # of a checkpoint
        self._trained = False  # `train` has ended once
        self._resumed: _Resumed | None = None
        self._updates_per_epoch = 0
        self._position = (0, 0)  # finished epochs, finished updates of the next
        self._updates = 0  # finished in this epoch
        self._epoch_rng: dict[str, Any] | None = None
        self._begun: int | None = None  # the step in progress
        self._offered = -1  # the last step whose state was offered to `run.checkpoint`
        self._losses: list[torch.Tensor] = []  # of the batches of this step
        self._tokens = 0
        self._earlier_s = 0.0  # of training, before the restore
        self._start_time = 0.0
        self._original: dict[str, Callable[..., Any]] = {}

    def install(self) -> None:
        replacements: dict[str, Callable[..., Any]] = {
            "_init_training_state": self._init_training_state,
            "_prepare_for_training": self._prepare_for_training,
            "_run_epoch": self._run_epoch,
            "_load_rng_state": self._load_rng_state,
            "_maybe_log_save_evaluate": self._maybe_log_save_evaluate,
            "_finalize_training": self._finalize_training,
            "get_batch_samples": self._get_batch_samples,
            "training_step": self._training_step,
            "evaluate": self._announced("evaluate", Phase.EVAL),
            "predict": self._announced("predict", Phase.EVAL),
            "_save_checkpoint": self._announced("_save_checkpoint", Phase.CHECKPOINT),
        }
        for name, replacement in replacements.items():
            self._original[name] = getattr(self._trainer, name)
            setattr(self._trainer, name, _Replacement(replacement))
        self._run.on_resize(self._resized)

    def _announced(self, name: str, phase: Phase) -> Callable[..., Any]:
        def announced(*args: Any, **kwargs: Any) -> Any:
            with self._run.phase(phase):
                return self._original[name](*args, **kwargs)

        return announced

    def _resized(self, old: hf.World, new: hf.World) -> None:
        raise InvalidSpec(
            "dp",
            new.dp_size,
            f"{old.dp_size} as in the checkpoint: Trainer deals its batches by the number of processes, so that another number "
            "would skip and repeat samples. Give the job `elastic: {min_dp, max_dp}` of this size",
        )

    # ------------------------------------------------------------ Trainer's methods

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        original = self._original["_init_training_state"]
        if trial is not None:
            raise InvalidSpec("trial", type(trial).__name__, "none: a hyperparameter search is many trainings")
        if self._trained:
            log.warning("only the first trainer.train() of a process is covered: this one starts over after a failure")
        self._updates_per_epoch = num_update_steps_per_epoch
        step = 0 if self._trained else self._run.restore_step
        resume = None if step else resume_from_checkpoint
        begins: tuple[int, int] = original(max_steps, num_update_steps_per_epoch, num_train_epochs, resume, trial)
        if not step:
            self._position = (begins[0], begins[1] // self._trainer.args.gradient_accumulation_steps)
            self._updates = self._position[1]
            return begins
        self._trainer.state.global_step = step
        # At least as many epochs are finished: `_run_epoch` passes over those that a callback had ended early.
        return step // num_update_steps_per_epoch, 0

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        covered = not self._trained
        resume = None if covered and self._run.restore_step else resume_from_checkpoint
        prepared = self._original["_prepare_for_training"](max_steps, train_dataloader, resume)
        if covered:
            trainer = self._trainer
            self._state = {
                **self._more,
                "model": trainer.model,
                "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
                "scheduler": trainer.lr_scheduler,
                "trainer": self,
            }
            if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
                self._state["scaler"] = scaler
            for _, parameters in optimizer_state.outside_modules(self._state, self._state):
                raise InvalidSpec(
                    "trainer.optimizer",
                    f"an optimizer with {len(parameters)} parameters that are not the model's",
                    "the module that has them, such as a loss: attach(trainer, state={'loss': module})",
                )
            self._run.restore(self._state)
        return prepared

    def _run_epoch(self, **kwargs: Any) -> Any:
        original, trainer, resumed = self._original["_run_epoch"], self._trainer, self._resumed
        if self._trained:
            return original(**kwargs)
        self._start_time = kwargs["start_time"]
        if resumed is None:
            if self._position != (kwargs["epoch"], self._updates):
                self._updates = 0
            self._epoch_rng = rng.capture()
            return original(**kwargs)
        if resumed.stopped or trainer.state.global_step >= trainer.state.max_steps:
            trainer.control.should_training_stop = True
            return None
        if kwargs["epoch"] < resumed.epoch:
            return None
        self._resumed = None
        self._take_over(resumed)
        self._updates = resumed.updates
        if resumed.updates and resumed.epoch_rng is not None:
            self._epoch_rng = resumed.epoch_rng
            rng.restore(resumed.epoch_rng)
        batches = resumed.updates * trainer.args.gradient_accumulation_steps
        return original(
            **{
                **kwargs,
                "resume_from_checkpoint": RESTORED,
                "epochs_trained": kwargs["epoch"],
                "steps_trained_in_current_epoch": batches,
            }
        )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint != RESTORED:
            self._original["_load_rng_state"](checkpoint)
            return
        self._run.reapply_rng()
        if not self._updates:
            self._epoch_rng = rng.capture()

    def _get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        original = self._original["get_batch_samples"]
        if self._trained:
            return original(epoch_iterator, num_batches, device)
        self._begun = self._trainer.state.global_step
        self._run.begin_step(self._begun)
        with self._run.data_wait():
            samples, items = original(epoch_iterator, num_batches, device)
        self._losses.clear()
        self._tokens = sum(map(self._tokens_of, samples))
        return samples, items

    def _tokens_of(self, batch: Any) -> int:
        name = getattr(self._trainer.model, "main_input_name", "")
        value = batch.get(name) if name in _TOKEN_INPUTS and hasattr(batch, "get") else None
        return value.numel() if isinstance(value, torch.Tensor) else 0

    def _training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = self._original["training_step"](*args, **kwargs)
        if not self._trained:
            self._losses.append(loss)
        return loss

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        original, trainer = self._original["_maybe_log_save_evaluate"], self._trainer
        if self._trained:
            original(tr_loss, grad_norm, *args, **kwargs)
            return
        stepped = self._begun is not None and trainer.state.global_step == self._begun + 1
        if stepped:
            self._begun = None
            self._updates += 1
            self._end_step(grad_norm)
        original(tr_loss, grad_norm, *args, **kwargs)
        epoch = args[2] if len(args) > 2 else kwargs["epoch"]
        control, whole = trainer.control, self._updates >= self._updates_per_epoch
        if stepped and (whole or control.should_epoch_stop or control.should_training_stop):
            return  # the epoch ends after this call
        interrupted = control.should_training_stop and not whole and not control.should_epoch_stop
        if stepped or interrupted:
            self._position = (epoch, self._updates)
        else:
            self._position, self._epoch_rng = (epoch + 1, 0), None
        if self._offered != trainer.state.global_step:
            self._offered = trainer.state.global_step
            self._run.checkpoint(self._state, self._offered)

    def _end_step(self, grad_norm: Any) -> None:
        """Report the step. On a device, a value is read only where Trainer reads it as well: reading waits for the device."""
        args, control = self._trainer.args, self._trainer.control
        reads = args.device.type == "cpu" or control.should_log
        losses = self._losses if reads or args.logging_nan_inf_filter else []
        self._run.end_step(
            loss=torch.stack([loss.float() for loss in losses]).sum() if losses else None,
            grad_norm=grad_norm if reads else None,
            tokens=self._tokens,
        )

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        if not self._trained:
            if self._resumed is not None:
                self._take_over(self._resumed)
            self._trained = True
            self._run.finish()
        return self._original["_finalize_training"](trial, num_train_samples, start_time - self._earlier_s)

    # ------------------------------------------------------------ its state

    def state_dict(self) -> dict[str, Any]:
        """Also called before the first step, to compare it with a checkpoint: some attributes do not exist yet then."""
        trainer, (epoch, updates) = self._trainer, self._position
        kept = {
            field.name: getattr(trainer.state, field.name)
            for field in dataclasses.fields(trainer.state)
            if field.name not in _NOT_RESTORED
        }
        stopped = trainer.control.should_training_stop and trainer.state.global_step < trainer.state.max_steps
        return {
            "layout": self._layout(),
            "state": json.dumps(kept, default=_plain),
            "callbacks": json.dumps([[type(each).__name__, each.state()] for each in self._stateful()], default=_plain),
            "epoch": epoch,
            "updates": updates,
            "epoch_rng": self._epoch_rng if updates else None,
            "stopped": bool(stopped),
            "tr_loss": getattr(trainer, "_tr_loss", torch.zeros(())),
            "total_loss": float(getattr(trainer, "_total_loss_scalar", 0.0)),
            "last_logged": int(getattr(trainer, "_globalstep_last_logged", 0)),
            "initial_step": int(getattr(trainer, "_initial_global_step", 0)),
            "flos": float(trainer.current_flos),
            "elapsed_s": self._earlier_s + time.time() - self._start_time,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Raises `InvalidSpec` if the arguments give the saved position another meaning."""
        trainer, layout = self._trainer, self._layout()
        for name, value in saved["layout"].items():
            if layout.get(name) != value:
                raise InvalidSpec(
                    name, layout.get(name), f"{value} as in the checkpoint: it is part of the data position"
                )
        for name, value in json.loads(saved["state"]).items():
            setattr(trainer.state, name, value)
        self._restore_callbacks(json.loads(saved["callbacks"]))
        self._earlier_s = saved["elapsed_s"]
        self._position = (saved["epoch"], saved["updates"])
        self._resumed = _Resumed(
            **{field.name: saved[field.name] for field in dataclasses.fields(_Resumed)},
        )

    def _layout(self) -> dict[str, int]:
        """What a number of updates means in samples."""
        args = self._trainer.args
        return {
            "per_device_train_batch_size": int(args.train_batch_size),
            "gradient_accumulation_steps": int(args.gradient_accumulation_steps),
            "updates_per_epoch": int(self._updates_per_epoch) if self._has_length() else 0,
            "data_seed": int(args.seed if args.data_seed is None else args.data_seed),
        }

    def _has_length(self) -> bool:
        return hasattr(self._trainer.train_dataset, "__len__")

    def _stateful(self) -> list[Any]:
        return [each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)]

    def _restore_callbacks(self, saved: list[list[Any]]) -> None:
        """Set the attributes of each callback that has state, in the order of those of its type."""
        for callback in self._stateful():
            index = next((i for i, (name, _) in enumerate(saved) if name == type(callback).__name__), None)
            if index is not None:
                _, rules = saved.pop(index)
                for attribute, value in rules.get("attributes", {}).items():
                    setattr(callback, attribute, value)

    def _take_over(self, resumed: _Resumed) -> None:
        """Continue the sums from which Trainer computes what it logs."""
        trainer = self._trainer
        trainer._tr_loss = resumed.tr_loss.to(trainer.args.device)
        trainer._total_loss_scalar = resumed.total_loss
        trainer._globalstep_last_logged = resumed.last_logged
        trainer._initial_global_step = resumed.initial_step
        trainer.current_flos = resumed.flos


def _plain(value: Any) -> Any:
    """Return a NumPy or torch number as a Python number: metrics may hold them."""
    return value.item() if hasattr(value, "item") else str(value)
