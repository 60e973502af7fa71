"""DeepSpeed under Holdfast.

    engine, _, loader, _ = deepspeed.initialize(model=model, optimizer=optimizer, training_data=dataset, config=config)
    run = attach(engine)                                 # restores, if there is a checkpoint
    for epoch in range(run.epoch, epochs):
        for batch in run.batches(loader):                # the first time from the restored position
            loss = engine(batch)
            engine.backward(loss)
            engine.step()

**Steps.** A step of the run ends with the `engine.step` at which the engine counts one (`engine.global_steps`): the boundary of
gradient accumulation. Its loss is that of `engine.backward`, summed over the micro-batches as DeepSpeed scales them, and its
gradient norm the engine's. Both are read from a device only every `steps_per_print` steps, because reading waits for it. A save
that is due is made at the end of `engine.step`. What the loop does after that in the same iteration is not done again
after a restore: let the loop's condition ask `run.steps_finished`.

**State** of each rank: module, optimizer (of ZeRO stage 1 and 2 its own partition), loss scaler, learning rate scheduler, the
engine's counters, position in the data, random numbers, and what `attach(engine, extra={...})` names. The engine's own files
are neither read nor written: `engine.save_checkpoint` works as ever, and is reported as a phase. `engine.load_checkpoint` is
called before `attach`; afterwards it raises `Conflict`, because it would replace what was restored.

**Position in the data.** `run.batches` replays: it sets the random state at which the epoch began, fetches the batches that
have been used and drops them (`holdfast.integrations.replay`). A loop with a source of its own can do without, if its batch
follows from `run.steps_finished`.

**Refused**, by name: ZeRO stage 3, offloading, stage 0 in half precision, pipelines, experts, model parallelism, and every
section of DeepSpeed's configuration that is not in `SECTIONS` and is on; another number of ranks than the one that saved; a
DeepSpeed with other signatures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

import holdfast.train as hf
from holdfast.domain.errors import Conflict, IncompatibleVersion, InvalidSpec
from holdfast.domain.signals import Phase
from holdfast.integrations.deepspeed_state import Counters, Partitioned
from holdfast.integrations.loop import LoopRun
from holdfast.integrations.replay import Replayed
from holdfast.integrations.tested import require_signatures, warn_if_untested
from holdfast.train.saves import optimizer_state

__all__ = ["DeepSpeedRun", "attach"]

TESTED = ((0, 19), (0, 19))
HELD = (
    *("module", "optimizer", "lr_scheduler", "global_steps", "global_samples", "skipped_steps", "micro_steps"),
    *("_config", "mpu", "mp_world_size", "has_moe_layers", "torch_autocast_z0_gradscaler"),
)
_LOAD = ("state_dict_list", "load_optimizer_states", "load_from_fp32_weights")
SIGNATURES: dict[type, dict[str, tuple[str, ...]]] = {
    DeepSpeedEngine: {
        "step": ("lr_kwargs",),
        "get_global_grad_norm": (),
    },
    DeepSpeedZeroOptimizer: {"state_dict": (), "_load_legacy_checkpoint": _LOAD},
    BF16_Optimizer: {"state_dict": (), "_load_legacy_checkpoint": _LOAD},
}
WRAPPERS = (DeepSpeedZeroOptimizer, BF16_Optimizer)
STAGE_MAX = 2
# Sections of DeepSpeed's configuration whose state is saved, or that have none. Another one is refused while it is on.
SECTIONS = frozenset({
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "optimizer",
    "scheduler", "fp16", "bf16", "zero_optimization", "zero_allow_untested_optimizer", "data_types",
    "communication_data_type", "prescale_gradients", "gradient_predivide_factor", "torch_autocast", "checkpoint",
    "activation_checkpointing", "dataloader_drop_last", "steps_per_print", "wall_clock_breakdown", "memory_breakdown",
    "sparse_gradients", "dump_state", "flops_profiler", "comms_logger", "tensorboard", "wandb", "comet", "csv_monitor",
})  # fmt: skip
ZERO_WITH_STATE = ("offload_optimizer", "offload_param", "cpu_offload", "elastic_checkpoint", "zenflow")


def attach(
    engine: DeepSpeedEngine, *, extra: Mapping[str, Any] | None = None, checkpoint: hf.Checkpoints | None = None
) -> DeepSpeedRun:
    """Return the run of this process with the state of `engine`, restored if there is a checkpoint.

    `extra`: further parts of the state, as in `run.restore`. `checkpoint`: where to save without an agent, as in `hf.launch`.
    Raises `InvalidSpec` or `IncompatibleVersion` that names what is not supported, and what `hf.attach` raises."""
    _require_supported(engine)
    return DeepSpeedRun(engine, hf.attach(checkpoint=checkpoint), extra or {})


def _require_supported(engine: DeepSpeedEngine) -> None:
    release = warn_if_untested("deepspeed", TESTED)
    require_signatures("deepspeed", SIGNATURES)
    if type(engine) is not DeepSpeedEngine:
        raise InvalidSpec(
            "engine", type(engine).__name__, "DeepSpeedEngine: pipelines and hybrid engines are not supported"
        )
    missing = [name for name in HELD if not hasattr(engine, name)]
    if missing:
        raise IncompatibleVersion(
            f"deepspeed {release} differs from what its integration uses: no DeepSpeedEngine.{missing[0]}"
        )
    stage = int(engine.zero_optimization_stage())
    if stage > STAGE_MAX:
        raise InvalidSpec(
            "zero_optimization.stage", stage, "0, 1 or 2: of stage 3, DeepSpeed gathers parameters to save them"
        )
    for field, found in _unsaved(engine):
        raise InvalidSpec(field, found, "off: the integration does not save its state")
    kind = type(engine.optimizer)
    if kind not in WRAPPERS and not optimizer_state.is_plain(engine.optimizer):
        raise InvalidSpec(
            "optimizer",
            f"{kind.__module__}.{kind.__name__}",
            "ZeRO stage 1 or 2, or an optimizer of torch on parameters in single precision",
        )


def _unsaved(engine: DeepSpeedEngine) -> Iterator[tuple[str, Any]]:
    """Return what is on and has, or may have, a state that is not saved: as (name in DeepSpeed's configuration, value)."""
    configuration: dict[str, Any] = engine._config._param_dict
    for section, value in configuration.items():
        if section not in SECTIONS and _is_on(value):
            yield section, value
    for name in ZERO_WITH_STATE:
        value = configuration.get("zero_optimization", {}).get(name)
        if _is_on(value):
            yield f"zero_optimization.{name}", value
    if engine.mpu is not None or engine.mp_world_size > 1:
        yield "mpu", f"model parallel size {engine.mp_world_size}"
    if engine.has_moe_layers:
        yield "model", "layers of experts"
    if engine.torch_autocast_z0_gradscaler is not None:
        yield "torch_autocast", "a gradient scaler"


def _is_on(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value.get("enabled", True)) and value.get("device") != "none"
    return bool(value)


class DeepSpeedRun(LoopRun):
    """An `hf.Run` for a loop over a DeepSpeed engine, created by `attach`. `run` is the run itself."""

    def __init__(self, engine: DeepSpeedEngine, run: hf.Run, extra: Mapping[str, Any]) -> None:
        self._data = Replayed(run)
        super().__init__(run, self._data)
        self._engine = engine
        self._step: hf.Step | None = None
        self._loss: torch.Tensor | None = None  # of the step in progress: the sum over its micro-batches
        self._state = {
            "module": engine.module,
            "optimizer": _stateful(engine.optimizer, run),
            "engine": Counters(engine),
            "data": self._data,
        }
        if engine.lr_scheduler is not None:
            self._state["lr_scheduler"] = engine.lr_scheduler
        if extra:
            self._state["extra"] = dict(extra)
        run.restore(self._state)
        for name, by in (
            ("forward", self._forward),
            ("backward", self._backward),
            ("step", self._end),
            ("save_checkpoint", self._script_saves),
            ("load_checkpoint", self._script_loads),
        ):
            _replace(engine, name, by)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Return the batches of one epoch of a train loader; in the restored epoch, those that are left. One loader per run.

        Raises `Conflict` for a second loader."""
        return self._data.batches(loader, self._begin)

    # ------------------------------------------------------------ the engine's methods

    def _begin(self) -> None:
        if self._step is None:
            self._step = self.run.begin_step(self.run.steps_finished)

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._engine.training:
            self._begin()
        return original(*args, **kwargs)

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        scaled = original(*args, **kwargs)
        if isinstance(scaled, torch.Tensor):
            loss = scaled.detach()
            self._loss = loss if self._loss is None else self._loss + loss
        return scaled

    def _end(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self._engine.global_steps
        result = original(*args, **kwargs)
        if self._engine.global_steps != before:
            self._begin()  # a script that computes its gradients without engine.forward
            self._step, loss, self._loss = None, self._loss, None
            if self._reads():
                self.run.end_step(loss=loss, grad_norm=self._engine.get_global_grad_norm())
            else:
                self.run.end_step()
            self._save()
        return result

    def _given_state(self) -> Mapping[str, Any]:
        return self._state

    def _reads(self) -> bool:
        every = 1 if self._engine.device.type == "cpu" else self._engine.steps_per_print()
        return bool(every) and self._engine.global_steps % every == 0

    def _script_saves(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.run.phase(Phase.CHECKPOINT):
            return original(*args, **kwargs)

    def _script_loads(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        raise Conflict(
            "engine.load_checkpoint was called after attach(engine): it would replace the state of the run. Call it before "
            "attach, which then restores Holdfast's checkpoint if there is one"
        )


def _replace(engine: DeepSpeedEngine, name: str, by: Callable[..., Any]) -> None:
    original = getattr(engine, name)
    setattr(engine, name, lambda *args, **kwargs: by(original, *args, **kwargs))


def _stateful(optimizer: Any, run: hf.Run) -> Any:
    if isinstance(optimizer, WRAPPERS):
        return Partitioned(optimizer, run.world.world_size)
    return optimizer
