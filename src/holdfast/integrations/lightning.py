"""Lightning under Holdfast. Nothing has to be written: the entry point `lightning.pytorch.callbacks_factory` adds the
callback to every `Trainer` in a worker of `holdfast run`. Under torchrun, a script gives it to the trainer itself:

    trainer = L.Trainer(callbacks=[HoldfastCallback(checkpoint=hf.Checkpoints(directory="…"))])

**What it does.** A step is a batch after which `trainer.global_step` has advanced. After it, and after the validation that
belongs to it, `run.checkpoint` saves what `trainer.save_checkpoint` would write, from memory to memory; after the last step
of an epoch, when the hooks of its end have run. A restarted `trainer.fit` continues there, whatever its `ckpt_path` is.
Evaluation and Lightning's own saving are announced as phases. Files that the script saves stay as they are.

**Position in the data** (`lightning_data`). A single train loader that knows its position (torchdata's `StatefulDataLoader`)
is set to it. Others are replayed: the epoch's iterator is made again from the same random state, and the batches that have
been used are fetched and dropped, which takes as long as the fetching. Where neither is exact, nothing is saved and the
reason is given.

**Refused**, by name: strategies other than one device and DDP; `training_step(dataloader_iter)`; another number of replicas
than the one that saved, because the position is that of each rank; a Lightning whose loops have other signatures than those
that this was written for. Added by the entry point, the callback then logs the reason and leaves the run alone: restarts
continue from the script's own checkpoints.

**Not covered.** Averages of metrics that are logged with `on_epoch=True`: in the resumed epoch they cover the batches since
the restart, as after `ckpt_path`. Gradients between two steps of an accumulation are never saved, because saves are made
between steps. Hyperparameters are not saved: the script passes them again. The first `fit` of a process is covered, further
ones run without saves."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn

import holdfast.train as hf
from holdfast.domain.errors import IncompatibleVersion, InvalidSpec
from holdfast.domain.signals import Phase
from holdfast.integrations.data_position import require_same_replicas
from holdfast.integrations.lightning_data import Feed, Position
from holdfast.integrations.tested import require_all_ranks, require_signatures, warn_if_untested

__all__ = ["HoldfastCallback"]

log = logging.getLogger("holdfast.integrations")

TESTED = ((2, 6), (2, 6))
# What is called or replaced, with its parameters: another Lightning may mean something else by the same name.
SIGNATURES: dict[type, dict[str, tuple[str, ...]]] = {
    _CheckpointConnector: {
        "resume_start": ("checkpoint_path", "weights_only"),
        "dump_checkpoint": ("weights_only",),
    },
    _FitLoop: {"_load_combined_loader_states": (), "on_advance_start": (), "on_advance_end": ()},
    _TrainingEpochLoop: {"on_run_start": ("data_fetcher",), "on_advance_end": ("data_fetcher",)},
    _Loop: {"reset_restart_stage": ()},
}
STRATEGIES = (SingleDeviceStrategy, DDPStrategy)
# Names under which scripts log the gradient norm; the second is that of Lightning's `grad_norm`.
GRAD_NORMS = ("grad_norm", "grad_2.0_norm_total")
HYPERPARAMETERS = tuple(
    getattr(owner, f"CHECKPOINT_HYPER_PARAMS_{part}")
    for owner in (pl.LightningModule, pl.LightningDataModule)
    for part in ("NAME", "KEY", "TYPE")
)


class HoldfastCallback(Callback):  # type: ignore[misc]  # Lightning is optional, so its types are not known
    """Steps, checkpoints and restore of `trainer.fit` through `hf.attach`.

    `checkpoint`: where to save without an agent, as in `hf.launch`. `optional`: log the reason instead of raising if the
    trainer cannot be covered; so added by the entry point. `fit` raises `InvalidSpec` or `IncompatibleVersion` that names
    what is not supported."""

    _had_a_fit = False  # of the process

    def __init__(self, checkpoint: hf.Checkpoints | None = None, *, optional: bool = False) -> None:
        self._checkpoint = checkpoint
        self._optional = optional
        self._fit: _Fit | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take part in the first `fit` of the process. The process group exists, nothing has been loaded yet."""
        if trainer.state.fn != TrainerFn.FITTING or self._is_second(trainer):
            return
        if HoldfastCallback._had_a_fit:
            log.warning("holdfast covers the first Trainer.fit of a process; this one runs without saves")
            return
        HoldfastCallback._had_a_fit = True
        try:
            _require_supported(trainer)
        except (InvalidSpec, IncompatibleVersion) as error:
            if not self._optional:
                raise
            log.warning("holdfast leaves this run to the script's own checkpoints: %s", error)
            return
        self._fit = _Fit(trainer, hf.attach(checkpoint=self._checkpoint), optional=self._optional)

    def _is_second(self, trainer: pl.Trainer) -> bool:
        """Whether the script has given another one to the trainer, which then counts."""
        callbacks: list[Callback] = trainer.callbacks
        return next(callback for callback in callbacks if isinstance(callback, HoldfastCallback)) is not self

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._fit is not None:
            self._fit.outputs = outputs

    def on_sanity_check_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evaluates(True)

    def on_sanity_check_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evaluates(False)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evaluates(True)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._evaluates(False)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """What follows in the script, such as `trainer.test`, has no steps."""
        if self._fit is not None:
            self._fit.finish()
            self._fit = None

    def _evaluates(self, begins: bool) -> None:
        if self._fit is not None:
            self._fit.evaluates(begins)


def _require_supported(trainer: pl.Trainer) -> None:
    warn_if_untested("lightning", TESTED)
    require_signatures("lightning", SIGNATURES)
    if type(trainer.strategy) not in STRATEGIES:
        names = " or ".join(strategy.__name__ for strategy in STRATEGIES)
        raise InvalidSpec(
            "strategy", type(trainer.strategy).__name__, f"{names}; sharded ones gather their state on rank 0"
        )
    require_all_ranks(
        "trainer.world_size", trainer.world_size, "Give Trainer devices=… of a node and num_nodes=… of the job"
    )


class _Fit:
    """One `trainer.fit` under a run: replaces five methods of this trainer's loops by ones that call them and do their own
    part."""

    def __init__(self, trainer: pl.Trainer, run: hf.Run, *, optional: bool) -> None:
        self._trainer = trainer
        self._run = run
        self._optional = optional
        self._said = False
        self._loop: _FitLoop = trainer.fit_loop
        self._epoch: _TrainingEpochLoop = trainer.fit_loop.epoch_loop
        self._state = {"lightning": self}
        self._loaded: dict[str, Any] | None = None
        self._resume: Position | None = None  # until the first batch after a restore
        self._feed = Feed(trainer.fit_loop)
        self._step: hf.Step | None = None
        self._global_step = 0
        self._phases = contextlib.ExitStack()
        self._saved_at = -1
        self.outputs: Any = None
        self._replace(trainer._checkpoint_connector, "resume_start", self._resume_start)
        self._replace(self._loop, "_load_combined_loader_states", self._before_first_iterator)
        self._replace(self._loop, "on_advance_start", self._epoch_starts)
        self._replace(self._loop, "on_advance_end", self._epoch_ends)
        self._replace(self._epoch, "on_run_start", self._batches_start)
        self._replace(self._epoch, "on_advance_end", self._batch_ends)
        self._replace(trainer, "save_checkpoint", self._script_saves)

    @staticmethod
    def _replace(owner: Any, name: str, by: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: by(original, *args, **kwargs))

    def finish(self) -> None:
        self._phases.close()
        self._run.finish()

    def evaluates(self, begins: bool) -> None:
        self._phases.close()
        if begins:
            self._phases.enter_context(self._run.phase(Phase.EVAL))

    def _script_saves(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with self._run.phase(Phase.CHECKPOINT):
            original(*args, **kwargs)

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """What `trainer.save_checkpoint` writes, without hyperparameters, and this rank's position in the data."""
        if self._loop._data_fetcher is None:  # asked by a restore, which places the tensors of a sharded state
            return {}
        checkpoint = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        for name in HYPERPARAMETERS:
            checkpoint.pop(name, None)
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
        progress = self._loop.epoch_progress.current
        position = self._feed.position(
            batches=self._epoch.batch_progress.current.ready,
            mid_epoch=progress.ready != progress.completed,
            replicas=self._run.world.dp_size,
            fetcher=self._loop._data_fetcher,
        )
        return {"trainer": checkpoint, "position": position.as_plain(), "should_stop": self._trainer.should_stop}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    # ------------------------------------------------------------ restore

    def _resume_start(
        self, original: Callable[..., Any], checkpoint_path: Any = None, weights_only: Any = None
    ) -> None:
        """Give Lightning the checkpoint of the run from memory. Its own restore methods do the rest."""
        connector = self._trainer._checkpoint_connector
        if not self._run.restore_step:
            return original(checkpoint_path, weights_only)  # type: ignore[no-any-return]
        step = self._run.restore(self._state)
        loaded, self._loaded = self._loaded, None
        assert loaded is not None
        position = Position.of_plain(loaded["position"])
        require_same_replicas(position.replicas, self._run)
        if checkpoint_path:
            log.info("holdfast restores step %d; the script's checkpoint %s is not loaded", step, checkpoint_path)
        # Lightning does not know that the position is restored as well.
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
        self._resume = position
        self._trainer.should_stop = loaded["should_stop"]
        connector._ckpt_path = None
        connector._loaded_checkpoint = loaded["trainer"]
        return None

    def _before_first_iterator(self, original: Callable[[], None]) -> None:
        """`setup_data` makes the iterator of the first epoch right after this, and that of an epoch with new loaders."""
        original()
        self._feed.iterator_is_made()

    def _epoch_starts(self, original: Callable[[], None]) -> None:
        if self._resume is not None and not self._resume.mid_epoch:
            self._feed.to_next_epoch(self._resume)
            self._continue()
            self._resume = None
            self._run.reapply_rng()
        original()

    def _batches_start(self, original: Callable[[Any], None], data_fetcher: Any) -> None:
        if isinstance(data_fetcher, _DataLoaderIterDataFetcher):
            raise InvalidSpec(
                "training_step", "a parameter dataloader_iter", "a batch: the position in the data is not known"
            )
        if self._trainer.current_epoch > 0 and self._resume is None:
            self._feed.iterator_is_made()  # in the original
        original(data_fetcher)
        if self._resume is None:
            self._feed.batches_begin(data_fetcher)
        else:
            with self._run.phase(Phase.RESTORE):
                self._feed.to(self._resume, data_fetcher, self._replaying)
            self._continue()
            self._resume = None
            self._run.reapply_rng()
            self._feed.batch_is_fetched(data_fetcher)
        self._feed.watch(data_fetcher)
        self._global_step = self._trainer.global_step
        self._begin_step()

    def _replaying(self, loaders: str) -> None:
        log.info("replaying the used batches of %s, to get to the restored position", loaders)

    def _continue(self) -> None:
        """From here on the loops do what they do in a run that was not interrupted."""
        self._epoch.restarting = False  # and of the loops inside
        for loop in (self._loop, self._epoch, self._epoch.val_loop):
            loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
            loop.reset_restart_stage()

    # ------------------------------------------------------------ steps

    def _begin_step(self) -> None:
        self._step = self._run.step(self._run.steps_finished)

    def _batch_ends(self, original: Callable[[Any], None], data_fetcher: Any) -> None:
        if self._trainer.global_step != self._global_step and self._step is not None:
            self._global_step = self._trainer.global_step
            self._report(self._step)
            self._step.__exit__(None, None, None)
            self._step = None
        original(data_fetcher)  # validation, if it is due
        if self._step is None and not self._epoch.done:  # otherwise the epoch's end follows
            self._save()
            self._begin_step()
        self._feed.batch_is_fetched(data_fetcher)

    def _epoch_ends(self, original: Callable[[], None]) -> None:
        original()
        if self._saved_at != self._run.steps_finished and self._step is None:
            self._save()

    def _save(self) -> None:
        self._saved_at = self._run.steps_finished
        if self._feed.refusal:
            if not self._optional:
                raise InvalidSpec("train_dataloader", "a position that cannot be restored", self._feed.refusal)
            if not self._said:
                self._said = True
                log.warning("holdfast saves nothing of this fit: %s", self._feed.refusal)
            return
        self._run.checkpoint(self._state, self._run.steps_finished)

    def _report(self, step: hf.Step) -> None:
        """Report the loss and gradient norm as often as Lightning logs, because reading them waits for the device."""
        every = self._trainer.log_every_n_steps
        if not every or self._trainer.global_step % every:
            return
        loss = self.outputs.get("loss") if isinstance(self.outputs, dict) else None
        metrics = self._trainer.callback_metrics
        norm = next((metrics[name] for name in GRAD_NORMS if name in metrics), None)
        step.log(loss=loss if isinstance(loss, torch.Tensor) else None, grad_norm=norm)
