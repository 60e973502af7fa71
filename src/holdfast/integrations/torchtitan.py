"""torchtitan under Holdfast.

    --override.imports holdfast.integrations.torchtitan.checkpoint

replaces torchtitan's checkpoint manager by one that saves and restores through the run. Its trainer calls the manager after
every step (`save`), which is where a step of the run ends.

**State** of each rank: what torchtitan's manager saves (model, optimizers, learning rate schedulers, data loader, the step and
tokens of the trainer), and random numbers. Sharded tensors are saved as this rank's pieces. Holdfast's checkpoint takes
precedence over one that torchtitan finds in its folder or is given; without one, torchtitan's own loading is used.

**Own files.** With `--checkpoint.enable`, torchtitan writes its files as ever, each as a phase, so that a long write is not
reported as a hang. Without it, it writes and reads none, and Holdfast saves all the same.

Outside of Holdfast the manager does what torchtitan's does.

**Loss and gradient norm** are reported at the steps at which torchtitan logs them. Its validation is a phase.

**Refused**, by name: a torchtitan with other signatures, another data-parallel size than the one that saved."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torchtitan.components.checkpointer import DATALOADER, TRAIN_STATE, CheckpointManager
from torchtitan.config.override import derive, override

import holdfast.train as hf
from holdfast.domain.signals import Phase
from holdfast.integrations.data_position import require_same_replicas
from holdfast.integrations.tested import require_signatures, warn_if_untested

__all__ = ["HoldfastCheckpointManager", "checkpoint"]

log = logging.getLogger("holdfast.integrations")

TESTED = ((0, 3), (0, 3))
SIGNATURES: dict[type, dict[str, tuple[str, ...]]] = {
    CheckpointManager: {
        "_load": ("step",),
        "_save": ("curr_step", "last_step"),
        "__init__": (
            *("config", "dataloader", "model_parts", "optimizers", "lr_schedulers"),
            *("states", "sd_adapter", "base_folder"),
        ),
    },
}


class HoldfastCheckpointManager(CheckpointManager):  # type: ignore[misc]  # torchtitan is optional: its types are not known
    """torchtitan's manager with the steps, checkpoints and restore of a run."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """As torchtitan's."""

    def __init__(self, config: Any, *, states: dict[str, Any], **parts: Any) -> None:
        """Raises `IncompatibleVersion` for a torchtitan that differs, and what `hf.attach` raises."""
        warn_if_untested("torchtitan", TESTED)
        require_signatures("torchtitan", SIGNATURES)
        self._run = hf.attach()
        self._own = config.enable
        self._step: hf.Step | None = None
        enable = config.enable or not self._run.inert
        super().__init__(dataclasses.replace(config, enable=enable), states=states, **parts)
        if enable:
            self._data = _Data(self.states[DATALOADER], self._run)
            self._state = {**self.states, DATALOADER: self._data}
            self._trainer = states.get(TRAIN_STATE)
            self._watch(self._trainer)

    def _watch(self, trainer: Any) -> None:
        """Report what torchtitan's trainer logs, and its validation as a phase."""
        for part, name, by in (
            (getattr(trainer, "metrics_processor", None), "log", self._logged),
            (getattr(trainer, "validator", None), "validate", self._validating),
            (trainer, "batch_generator", self._batches),
        ):
            if callable(original := getattr(part, name, None)):
                setattr(part, name, _around(original, by))

    def _load(self, step: int = -1) -> bool:
        loaded = False
        if self._run.restore_step:
            restored = self._run.restore(self._state)
            log.info("holdfast restores step %d; torchtitan's own checkpoints are not loaded", restored)
            loaded = True
        elif self._own:
            loaded = bool(super()._load(step))
        self._begin(int(getattr(self._trainer, "step", self._run.steps_finished)))
        return loaded

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._step is not None:
            self._step = None
            self._run.end_step()
        saved = False
        if self._own:
            with self._run.phase(Phase.CHECKPOINT):
                saved = bool(super()._save(curr_step, last_step))
        if curr_step:  # 0: the seed checkpoint, before any step
            self._run.checkpoint(self._state, curr_step)
            if last_step:
                self._run.finish()
            else:
                self._begin(curr_step)
        return saved

    def _begin(self, step: int) -> None:
        self._step = self._run.begin_step(step)

    def _logged(self, original: Callable[..., Any], step: int, *values: Any, **named: Any) -> Any:
        """torchtitan's `log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)`."""
        given = dict(zip(("global_avg_loss", "global_max_loss", "grad_norm"), values, strict=False)) | named
        if self._step is not None:
            self._step.log(loss=given.get("global_avg_loss"), grad_norm=given.get("grad_norm"))
        return original(step, *values, **named)

    def _validating(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._run.phase(Phase.EVAL):
            return original(*args, **kwargs)

    def _batches(self, original: Callable[..., Iterator[Any]], *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Making the loader's iterator draws a random number, which a run that was not interrupted did not draw here."""
        batches = original(*args, **kwargs)
        first = True
        while True:
            try:
                with self._run.data_wait():
                    batch = next(batches)
            except StopIteration:
                return
            if first:
                self._run.reapply_rng()
                first = False
            yield batch


class _Data:
    """torchtitan's data loader as part of the state; it may be None."""

    def __init__(self, loader: Any, run: hf.Run) -> None:
        self._loader = loader
        self._run = run

    def state_dict(self) -> dict[str, Any]:
        loader = None if self._loader is None else self._loader.state_dict()
        return {"replicas": self._run.world.dp_size, "loader": loader}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_same_replicas(state["replicas"], self._run)
        if self._loader is not None and state["loader"] is not None:
            self._loader.load_state_dict(state["loader"])


@override(  # type: ignore[untyped-decorator]
    target=CheckpointManager.Config,
    description="Save and restore through Holdfast; torchtitan's own files are written as configured",
    exact=True,
)
def checkpoint(config: Any) -> HoldfastCheckpointManager.Config:
    """For `--override.imports holdfast.integrations.torchtitan.checkpoint`."""
    replaced: HoldfastCheckpointManager.Config = derive(config, HoldfastCheckpointManager.Config)
    return replaced


def _around(original: Callable[..., Any], by: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: by(original, *args, **kwargs)
