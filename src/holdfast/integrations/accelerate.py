"""Hugging Face Accelerate under Holdfast.

    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    run = attach(accelerator)                            # restores, if there is a checkpoint
    for epoch in range(run.epoch, epochs):
        for batch in run.batches(loader):                # the first time from the restored position
            with run.step(), accelerator.accumulate(model):
                ...

**State**: the prepared models, optimizers and schedulers, the gradient scaler, and the objects of
`accelerator.register_for_checkpointing`. They must be prepared and registered before `attach`.

**Steps.** `with run.step()` surrounds one batch. A step of the run ends with the batch after which
`accelerator.sync_gradients` is set; the batches that are accumulated before it belong to it. At its end a save is made if one
is due. What `with run.step() as step` logs by `step.log(loss=…)` is reported with the step.

**Position in the data.** A loader that Accelerate made a `StatefulDataLoader` is set to its position if its sampler has a
known order and its dataset uses no random numbers of the training process:
`DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)`. Any other is replayed: its iterator is
made again from the same random state, and the batches that have been used are fetched and dropped, which takes as long as the
fetching. `accelerate.skip_first_batches` would be faster, and give other batches where a dataset uses random numbers. A
dataset that is iterated must not draw its order from the random numbers of the training process after the first batch.

**Refused**, by name: distributed types other than one process and DistributedDataParallel (for FSDP2, use
`holdfast.integrations.dcp`); loaders that one process reads for all (`dispatch_batches`); another number of replicas than the
one that saved, because the position is that of each rank; an Accelerate with other signatures."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import DistributedType

import holdfast.train as hf
from holdfast.domain.errors import IncompatibleVersion, InvalidSpec
from holdfast.domain.signals import Phase
from holdfast.integrations.data_position import require_same_loader, require_same_replicas
from holdfast.integrations.loop import LoopRun
from holdfast.integrations.replay import Moment, has_known_order
from holdfast.integrations.tested import require_all_ranks, require_signatures, warn_if_untested
from holdfast.train.saves import rng

__all__ = ["AcceleratedRun", "attach"]

log = logging.getLogger("holdfast.integrations")

TESTED = ((1, 15), (1, 15))
HELD = ("_models", "_optimizers", "_schedulers", "_custom_objects", "scaler", "step", "sync_gradients")
SIGNATURES: dict[type, dict[str, tuple[str, ...]]] = {
    Accelerator: {"register_for_checkpointing": ("objects",)},
    DataLoaderShard: {"__iter__": (), "set_epoch": ("epoch",)},
}
TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def attach(accelerator: Accelerator, *, checkpoint: hf.Checkpoints | None = None) -> AcceleratedRun:
    """Return the run of this process with what `accelerator` has prepared and registered, restored if there is a checkpoint.

    `checkpoint`: where to save without an agent, as in `hf.launch`. Raises `InvalidSpec` or `IncompatibleVersion` that names
    what is not supported, and what `hf.attach` raises."""
    _require_supported(accelerator)
    return AcceleratedRun(accelerator, hf.attach(checkpoint=checkpoint))


def _require_supported(accelerator: Accelerator) -> None:
    release = warn_if_untested("accelerate", TESTED)
    require_signatures("accelerate", SIGNATURES)
    missing = [name for name in HELD if not hasattr(accelerator, name)]
    if missing:
        raise IncompatibleVersion(
            f"accelerate {release} differs from what its integration uses: no Accelerator.{missing[0]}"
        )
    if accelerator.distributed_type not in TYPES:
        raise InvalidSpec(
            "distributed_type", accelerator.distributed_type.value, ", ".join(each.value for each in TYPES)
        )
    require_all_ranks("accelerator.num_processes", accelerator.num_processes, "Without GPUs, use Accelerator(cpu=True)")


class AcceleratedRun(LoopRun):
    """An `hf.Run` for a loop over prepared loaders, created by `attach`. `run` is the run itself."""

    def __init__(self, accelerator: Accelerator, run: hf.Run) -> None:
        self._data = _Position(accelerator, run)
        super().__init__(run, self._data)
        self._accelerator = accelerator
        self._state = _state(accelerator, self._data)
        self._step: hf.Step | None = None
        run.restore(self._state)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Return the batches of one epoch of a prepared train loader; in the restored epoch, those that are left. One loader
        per run.

        Raises `InvalidSpec` for a loader that Accelerate has not prepared, or that is read by one process for all."""
        return self._data.batches(loader)

    @contextlib.contextmanager
    def step(self) -> Iterator[hf.Step]:
        """Context of one batch. Saves at the end of a step if a save is due. Raises what `hf.Run.step` and `checkpoint`
        raise."""
        if self._step is None:
            self._step = self.run.begin_step(self.run.steps_finished)
        yield self._step
        if self._accelerator.sync_gradients:
            self._step = None
            self.run.end_step()
            self._save()

    def _given_state(self) -> dict[str, Any]:
        return self._state


def _state(accelerator: Accelerator, data: _Position) -> dict[str, Any]:
    def numbered(objects: list[Any], inner: str = "") -> dict[str, Any]:
        return {str(number): getattr(each, inner, each) if inner else each for number, each in enumerate(objects)}

    state = {
        "models": numbered(accelerator._models),
        "optimizers": numbered(accelerator._optimizers, "optimizer"),
        "schedulers": numbered(accelerator._schedulers, "scheduler"),
        "custom": numbered(accelerator._custom_objects),
        "data": data,
    }
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    return state


class _Position:
    """Where this rank is in its data, as part of the state."""

    def __init__(self, accelerator: Accelerator, run: hf.Run) -> None:
        self._accelerator = accelerator
        self._run = run
        self._loader: Any = None
        self._used = 0  # batches of this epoch that the script has got
        self._iteration = 0  # of the loader, in this epoch
        self._primed = False
        self._at_iterator: Moment | None = None
        self._at_latest: Moment | None = None  # when the latest batch was asked for; Accelerate fetches one ahead
        self._stateful = False
        self._drew = False  # fetching used random numbers of this process: then only a replay gives the one ahead again
        self._resume: dict[str, Any] | None = None
        self.epoch = 0
        self.on_epoch: Callable[[], None] = lambda: None

    @property
    def at_end(self) -> bool:
        return bool(self._loader is not None and self._loader.end_of_dataloader)

    def state_dict(self) -> dict[str, Any]:
        if self._at_iterator is None and self._loader is not None:
            self._enter(self._loader)  # between two epochs
        moments = (self._at_iterator, self._at_latest)
        at_iterator, at_latest = (None if moment is None else moment.as_plain() for moment in moments)
        return {
            "replicas": self._run.world.dp_size,
            "accumulated": self._accelerator.step,
            "epoch": self.epoch,
            "used": self._used,
            "iteration": self._iteration,
            "primed": self._primed,
            "at_iterator": at_iterator,
            "at_latest": at_latest,
            "loader": self._loader.state_dict() if self._can_be_set() else None,
        }

    def _can_be_set(self) -> bool:
        """Whether the loader's own state leads to the same batches. That of a finished epoch leads to the next one, and what
        fetching draws is known from the second batch on."""
        return self._stateful and self._used > 1 and not self._drew and not self._loader.end_of_dataloader

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_same_replicas(state["replicas"], self._run)
        self._resume = state
        self._accelerator.step = state["accumulated"]
        self.epoch, self._used, self._iteration = state["epoch"], state["used"], state["iteration"]

    def batches(self, loader: Any) -> Iterator[Any]:
        if type(loader) is not DataLoaderShard:
            raise InvalidSpec(
                "loader",
                type(loader).__name__,
                "DataLoaderShard, as accelerator.prepare makes it without dispatch_batches",
            )
        require_same_loader(loader, self._loader)
        self._loader = loader
        self._stateful = bool(loader.use_stateful_dataloader) and has_known_order(loader)
        iterator = self._begin(loader) if self._resume is None else self._continue(loader, self._resume)
        while True:
            self._at_latest = Moment.now([loader])
            began = self._used
            try:
                with self._run.data_wait():
                    batch = next(iterator)
            except StopIteration:
                break
            self._used = began + 1
            if self._stateful and began and not self._drew:
                self._drew = rng.capture() != self._at_latest.process
            yield batch
        self.epoch += 1
        self._used = 0
        self._at_iterator = self._at_latest = None

    def _begin(self, loader: Any) -> Iterator[Any]:
        self._enter(loader)
        self.on_epoch()
        return iter(loader)

    def _enter(self, loader: Any) -> None:
        """The position is the beginning of an epoch."""
        self._used = 0
        self._iteration = loader.iteration
        self._primed = _is_primed(loader)
        self._at_iterator = Moment.now([loader])

    def _continue(self, loader: Any, saved: dict[str, Any]) -> Iterator[Any]:
        """Return an iterator whose next batch is the one that would have come, and set the random states for it."""
        self._resume = None
        loader.iteration = saved["iteration"]
        self._primed = saved["primed"]
        if _is_primed(loader) and not self._primed:
            loader.base_dataloader.load_state_dict({})
        self._at_iterator = Moment(**saved["at_iterator"])
        iterator: Iterator[Any]
        if saved["loader"] is not None:
            loader.load_state_dict(saved["loader"])
            iterator = iter(loader)
            batch = next(iterator)  # makes the inner iterator, which draws a seed
            self._run.reapply_rng()
            return itertools.chain([batch], iterator)
        if self._used:
            log.info("replaying %d batches to the restored position", self._used)
        with self._run.phase(Phase.RESTORE):
            self._at_iterator.restore([loader])
            iterator = iter(loader)
            for number in range(self._used):
                if number == self._used - 1:
                    Moment(**saved["at_latest"]).restore([loader])
                next(iterator)
        self._run.reapply_rng()
        return iterator


def _is_primed(loader: Any) -> bool:
    """Whether a `StatefulDataLoader` has made its next iterator, and drawn a seed for it, when its state was asked for
    first."""
    return bool(getattr(loader.base_dataloader, "_initial_iter_for_state_dict", False))
