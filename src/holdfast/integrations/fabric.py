"""Lightning Fabric under Holdfast.

    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    run = attach(fabric, {"model": model, "optimizer": optimizer})   # restores, if there is a checkpoint
    for epoch in range(run.epoch, epochs):
        for batch in run.batches(loader):                # the first time from the restored position
            with run.step() as step:
                ...
                fabric.backward(loss)
                optimizer.step()
                step.log(loss=loss)

**State**: the dictionary that `fabric.save` gets, the gradient scaler of Fabric's precision, the position in the data and
random numbers. Plain values of the dictionary are replaced in it by a restore.

**Steps.** `with run.step()` surrounds one batch. A step of the run ends with the block in which an optimizer of the state has
stepped; batches whose gradients are accumulated before it belong to it. At its end a save is made if one is due.

**Position in the data.** `run.batches` replays, as `holdfast.integrations.replay` describes: the batches that have been used
are fetched again and dropped.

**Own files.** `fabric.save` works as ever, and is a phase. `fabric.load` into a state is called before `attach`; afterwards it
raises `Conflict`, because it would replace what was restored.

**Refused**, by name: strategies other than one device and DDP, a state without an optimizer of Fabric, data loaders in the
state, another number of replicas than the one that saved, a Fabric with other signatures.

With more than two ranks, call `hf.attach()` before `fabric.setup`: the order in which DDP adds gradients is part of a
checkpoint only for modules that are wrapped later."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.fabric.wrappers import _FabricDataLoader, _FabricModule, _FabricOptimizer

import holdfast.train as hf
from holdfast.domain.errors import Conflict, InvalidSpec
from holdfast.domain.signals import Phase
from holdfast.integrations.loop import LoopRun
from holdfast.integrations.replay import Replayed
from holdfast.integrations.tested import require_all_ranks, require_signatures, warn_if_untested

__all__ = ["FabricRun", "attach"]

TESTED = ((2, 6), (2, 6))
SIGNATURES: dict[type, dict[str, tuple[str, ...]]] = {
    _FabricOptimizer: {"__init__": ("optimizer", "strategy", "callbacks"), "step": ("closure",)},
    _FabricDataLoader: {"__iter__": ()},
    Fabric: {"save": ("path", "state", "filter"), "load": ("path", "state", "strict", "weights_only")},
}
STRATEGIES = (SingleDeviceStrategy, DDPStrategy)


def attach(fabric: Fabric, state: dict[str, Any], *, checkpoint: hf.Checkpoints | None = None) -> FabricRun:
    """Return the run of this process with `state`, the dictionary for `fabric.save`, restored if there is a checkpoint.

    `checkpoint`: where to save without an agent, as in `hf.launch`. Raises `InvalidSpec` or `IncompatibleVersion` that names
    what is not supported, and what `hf.attach` raises."""
    _require_supported(fabric, state)
    return FabricRun(fabric, hf.attach(checkpoint=checkpoint), state)


def _require_supported(fabric: Fabric, state: dict[str, Any]) -> None:
    warn_if_untested("lightning", TESTED)
    require_signatures("lightning", SIGNATURES)
    if type(fabric.strategy) not in STRATEGIES:
        names = " or ".join(strategy.__name__ for strategy in STRATEGIES)
        raise InvalidSpec("strategy", type(fabric.strategy).__name__, f"{names}; for FSDP2, use the calls of DCP")
    require_all_ranks(
        "fabric.world_size", fabric.world_size, "Give Fabric devices=… of a node and num_nodes=… of the job"
    )
    if not any(isinstance(value, _FabricOptimizer) for value in state.values()):
        raise InvalidSpec("state", sorted(state), "a dictionary with an optimizer that fabric.setup has returned")
    for key, value in state.items():
        if isinstance(value, _FabricDataLoader):
            raise InvalidSpec(f"state[{key!r}]", "a data loader", "no loader: run.batches(loader) keeps its position")


class FabricRun(LoopRun):
    """An `hf.Run` for a loop with Fabric, created by `attach`. `run` is the run itself."""

    def __init__(self, fabric: Fabric, run: hf.Run, state: dict[str, Any]) -> None:
        self._data = Replayed(run)
        super().__init__(run, self._data)
        self._precision = fabric.strategy.precision
        self._given = state
        self._step: hf.Step | None = None
        self._stepped = False  # an optimizer, since the last step of the run
        for optimizer in state.values():
            if isinstance(optimizer, _FabricOptimizer):
                optimizer._callbacks = [*optimizer._callbacks, self]
        restored = self._state()
        run.restore(restored)
        given = {
            key: state[key] if isinstance(state.get(key), _FabricModule | _FabricOptimizer) else value
            for key, value in restored["given"].items()
        }
        state.clear()  # a restore adds and removes keys with plain values
        state.update(given)
        self._save, self._load = fabric.save, fabric.load
        fabric.save, fabric.load = self._script_saves, self._script_loads

    def batches(self, loader: Any) -> Iterator[Any]:
        """Return the batches of one epoch of a train loader; in the restored epoch, those that are left. One loader per run.

        Raises `Conflict` for a second loader."""
        return self._data.batches(loader, self._begin)

    @contextlib.contextmanager
    def step(self) -> Iterator[hf.Step]:
        """Context of one batch. Saves at the end of a step if a save is due. Raises what `hf.Run.step` and `checkpoint`
        raise."""
        yield self._begin()
        if self._stepped:
            self._step, self._stepped = None, False
            self.run.end_step()
            self.run.checkpoint(self._state(), self.run.steps_finished)

    def on_after_optimizer_step(self, **_: Any) -> None:
        """Fabric's hook, called by each of its optimizers."""
        self._stepped = True

    def _begin(self) -> hf.Step:
        if self._step is None:
            self._step = self.run.begin_step(self.run.steps_finished)
        return self._step

    def _state(self) -> dict[str, Any]:
        given = {key: _unwrapped(value) for key, value in self._given.items()}
        return {"given": given, "precision": self._precision, "data": self._data}

    def _script_saves(self, *args: Any, **kwargs: Any) -> None:
        with self.run.phase(Phase.CHECKPOINT):
            self._save(*args, **kwargs)

    def _script_loads(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> Any:
        if state is not None:
            raise Conflict(
                "fabric.load was called with a state after attach(fabric, state): it would replace the state of the run. Call "
                "it before attach, which then restores Holdfast's checkpoint if there is one"
            )
        return self._load(path, state, *args, **kwargs)


def _unwrapped(value: Any) -> Any:
    if isinstance(value, _FabricModule):
        return value.module  # the one that the script gave to fabric.setup
    return value.optimizer if isinstance(value, _FabricOptimizer) else value
