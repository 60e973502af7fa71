"""Megatron-Bridge under Holdfast.

    from holdfast.integrations.megatron_bridge import attach

    pretrain(config, forward_step, callbacks=attach(config))

`attach` names Holdfast's checkpoint manager in the configuration, and returns callbacks. Bridge's training loop calls the
manager at the top of every iteration (`finalize_async_saves`), when the last step has been counted: that is where a step is
saved.

**State** of each rank: model chunks and optimizer (`megatron_core.Sharded`), the scheduler, Bridge's train state (step,
consumed samples), random numbers and those of the tracker. The position in the data follows from the consumed samples.
Holdfast's checkpoint takes precedence over one that `checkpoint.load` names; without one, Bridge's own loading is used.

**Own files** are written as configured, each as a phase, so that a long write is not reported as a hang. Evaluation and test
are phases as well. Outside of Holdfast the manager does what Bridge's does.

**Loss and gradient norm** are reported at the steps at which Bridge logs, because reading a loss waits for the device.

**Refused**, by name: a Bridge without custom managers or with other signatures, PEFT, FSDP, external data loaders, in-process
restart, other parallel sizes than those that saved."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import holdfast.train as hf
from holdfast.domain.errors import Conflict, IncompatibleVersion, InvalidSpec
from holdfast.domain.signals import Phase
from holdfast.integrations.megatron_core import Sharded, Tracker
from holdfast.integrations.tested import require_signatures

__all__ = ["HoldfastCallback", "HoldfastCheckpointManager", "attach"]

PREFIX = "holdfast.integrations."
SIGNATURES = {
    "save": ("ctx", "callback_manager"),
    "load": ("ctx",),
    "finalize_async_saves": ("state", "blocking", "terminate"),
}
# What is on and has a state, or a way to restart, that is not this integration's: section and field of Bridge's configuration.
REFUSED = (
    ("dist", "use_torch_fsdp2", "its parameters are loaded by Bridge alone"),
    ("dist", "use_megatron_fsdp", "its optimizer has no state of one rank alone"),
    ("ddp", "use_megatron_fsdp", "its optimizer has no state of one rank alone"),
    ("inprocess_restart", "enabled", "Holdfast restarts the processes"),
)


def attach(config: Any) -> list[Any]:
    """Set Holdfast's checkpoint manager in Bridge's `ConfigContainer`. Returns the callbacks for `pretrain`.

    Raises `IncompatibleVersion` or `InvalidSpec` that names what is not supported, and `Conflict` if the configuration has
    another manager."""
    from megatron.bridge.training import checkpointing
    from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix

    own = getattr(checkpointing, "DefaultCheckpointManager", None)
    if own is None or not hasattr(config.checkpoint, "custom_manager_class"):
        raise IncompatibleVersion(
            "this megatron-bridge has no checkpoint.custom_manager_class (0.3.1 does not). Install a release that has it, or "
            "train without the integration: a restart from your own checkpoints remains"
        )
    require_signatures("megatron-bridge", {own: SIGNATURES})
    if getattr(config, "peft", None) is not None:
        raise InvalidSpec(
            "peft", type(config.peft).__name__, "None: Bridge restores adapters from its own checkpoints only"
        )
    for section, field, why in REFUSED:
        if getattr(getattr(config, section, None), field, False):
            raise InvalidSpec(f"{section}.{field}", True, f"False: {why}")
    loader = getattr(config.dataset, "dataloader_type", None)
    if loader == "external":
        raise InvalidSpec(
            "dataset.dataloader_type",
            loader,
            "single, cyclic or batch: the position of an external loader is not known",
        )
    name = f"{__name__}.{HoldfastCheckpointManager.__name__}"
    if config.checkpoint.custom_manager_class not in (None, name):
        raise Conflict(
            f"checkpoint.custom_manager_class is {config.checkpoint.custom_manager_class}: there can be one manager"
        )
    register_allowed_target_prefix(PREFIX)
    config.checkpoint.custom_manager_class = name
    return [HoldfastCallback()]


class _Training:
    """What the manager and the callback of this process share: the run, and the parts of its state."""

    def __init__(self) -> None:
        self.run = hf.attach()
        self.tracker = Tracker()
        self.parts: dict[str, Any] | None = None
        self.chunks: list[Any] = []
        self.optimizer: Any = None
        self.syncs = False  # whether parameters are gathered in the next forward pass only
        self.restored: dict[str, Any] | None = None  # of the tracker, until the first step
        self.stepped = False  # a step has ended, and was not offered to be saved yet

    def know(self, state: Any, model: list[Any], optimizer: Any, scheduler: Any) -> None:
        self.chunks, self.optimizer = list(model), optimizer
        ddp, own = state.cfg.ddp, state.cfg.optimizer
        self.syncs = bool(own.use_distributed_optimizer and ddp.overlap_param_gather)
        self.parts = {"sharded": Sharded(model, optimizer), "train": state.train_state, "tracker": self.tracker}
        if scheduler is not None:
            self.parts["scheduler"] = scheduler

    def offer(self, step: int) -> None:
        """Save the state after `step` finished steps, if a save is due."""
        if not self.stepped or self.parts is None:
            return
        self.stepped = False
        if self.syncs and self.run.saves and self.run.due():
            if (prepare := getattr(self.optimizer, "prepare_model_params_for_param_sync", None)) is not None:
                prepare()  # of releases after Megatron-Core 0.16
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        self.run.checkpoint(self.parts, step)


_training: _Training | None = None


def _of_process() -> _Training:
    global _training
    if _training is None:
        _training = _Training()
    return _training


class HoldfastCheckpointManager:
    """Bridge's manager with the checkpoints of a run; `checkpoint.custom_manager_class` names it."""

    def __init__(self, checkpoint_config: Any) -> None:
        from megatron.bridge.training.checkpointing import DefaultCheckpointManager

        self.checkpoint_config = checkpoint_config
        self._own = DefaultCheckpointManager(checkpoint_config)
        self._training = _of_process()
        self._run = self._training.run

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        """Bridge's own; with a checkpoint of the run, it says that there is a local one, so that Bridge calls `load`."""
        context = dict(self._own.checkpointing_context)
        if self._run.restore_step:
            context["local_checkpoint_manager"] = _Local(self._run.restore_step)
        return context

    def load(self, ctx: Any) -> tuple[int, int]:
        """Restore the run's checkpoint; without one, what Bridge's manager loads. Returns the number of finished steps and of
        floating point operations."""
        if not self._run.restore_step:
            step, operations = self._own.load(ctx)
            return int(step), int(operations)
        from megatron.core.num_microbatches_calculator import update_num_microbatches

        self._training.know(ctx.state, ctx.model, ctx.optimizer, ctx.opt_param_scheduler)
        assert self._training.parts is not None
        self._run.restore(self._training.parts)
        self._training.restored = self._training.tracker.state_dict()
        train = ctx.state.train_state
        update_num_microbatches(consumed_samples=train.consumed_train_samples, consistency_check=False)
        return int(train.step), int(train.floating_point_operations_so_far)

    def save(self, ctx: Any, callback_manager: Any) -> None:
        """Write Bridge's own checkpoint."""
        with self._run.phase(Phase.CHECKPOINT):
            self._own.save(ctx, callback_manager)

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Bridge's own, and the save of the step that has been counted since the last call."""
        self._own.finalize_async_saves(state=state, blocking=blocking, terminate=terminate)
        self._training.offer(int(state.train_state.step))


class HoldfastCallback:
    """Steps, losses and phases of a run. `attach` returns it."""

    def __init__(self) -> None:
        self._phase = ExitStack()
        self._step: hf.Step | None = None

    def on_train_start(self, context: Any) -> None:
        _of_process().know(context.state, context.model, context.optimizer, context.scheduler)

    def on_train_step_start(self, context: Any) -> None:
        training = _of_process()
        if training.restored is not None:  # data loaders draw random numbers when they are made
            training.run.reapply_rng()
            training.tracker.load_state_dict(training.restored)
            training.restored = None
        self._step = training.run.begin_step(int(context.state.train_state.step))

    def on_train_step_end(self, context: Any) -> None:
        training = _of_process()
        every = int(context.state.cfg.logger.log_interval)
        if self._step is not None and every and (int(context.state.train_state.step) + 1) % every == 0:
            losses = list((context.loss_dict or {}).values())
            self._step.log(loss=losses[0] if len(losses) == 1 else None, grad_norm=context.grad_norm)
        self._step = None
        training.stepped = True
        training.run.end_step()

    def on_train_end(self, context: Any) -> None:
        _of_process().run.finish()

    def on_eval_start(self, context: Any) -> None:
        self._phase.enter_context(_of_process().run.phase(Phase.EVAL))

    def on_eval_end(self, context: Any) -> None:
        self._phase.close()

    on_test_start, on_test_end = on_eval_start, on_eval_end


class _Local:
    """In place of a manager of local checkpoints: says that there is one."""

    def __init__(self, step: int) -> None:
        self._step = step

    def find_latest(self) -> int:
        return self._step
