"""Random states at which a data loader gives the same batches again: to replay an epoch up to a position."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import holdfast.train as hf
from holdfast.domain.signals import Phase
from holdfast.integrations.data_position import require_same_loader, require_same_replicas
from holdfast.train.saves import rng

log = logging.getLogger("holdfast.integrations")


@dataclass(frozen=True, slots=True)
class Moment:
    """The random states of the process and of the loaders' own generators."""

    process: dict[str, Any]
    loaders: list[bytes | None]

    @classmethod
    def now(cls, loaders: list[Any]) -> Moment:
        owned = (getattr(part, name, None) for part, name in _slots(loaders))
        states = [bytes(each.get_state().tolist()) if isinstance(each, torch.Generator) else None for each in owned]
        return cls(rng.capture(), states)

    def as_plain(self) -> dict[str, Any]:
        return {"process": self.process, "loaders": self.loaders}

    def restore(self, loaders: list[Any]) -> None:
        rng.restore(self.process)
        self.restore_loaders(loaders)

    def restore_loaders(self, loaders: list[Any]) -> None:
        for (part, name), state in zip(_slots(loaders), self.loaders, strict=True):
            if state is not None:
                generator = getattr(part, name, None)
                if generator is None:  # a sampler may make it when its first epoch begins
                    generator = torch.Generator()
                    setattr(part, name, generator)
                generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


# Samplers whose order follows from their own state, or from their arguments and the epoch. By name, because some are of
# optional packages.
KNOWN_ORDER = frozenset({
    "torch.utils.data.sampler.SequentialSampler",
    "torch.utils.data.dataloader._InfiniteConstantSampler",  # of an iterable dataset
    "torch.utils.data.distributed.DistributedSampler",
    "torchdata.stateful_dataloader.sampler.RandomSampler",
    "torchdata.stateful_dataloader.sampler.StatefulDistributedSampler",
    "accelerate.data_loader.SeedableRandomSampler",
})  # fmt: skip


def has_known_order(loader: Any) -> bool:
    """Whether no sampler of the loader draws its order from random numbers that are not part of the loader's state."""
    innermost = [each for each in _parts([loader]) if not any(getattr(each, name, None) for name in _INNER)]
    names = {f"{type(each).__module__}.{type(each).__qualname__}" for each in innermost}
    return names <= KNOWN_ORDER


def _slots(loaders: list[Any]) -> list[tuple[Any, str]]:
    """Return where loaders and their samplers may have generators of their own, in a fixed order."""
    return [(part, name) for part in _parts(loaders) for name in ("generator", "synchronized_generator")]


PASSES = "_num_iter_calls"  # by which Fabric's loader sets its sampler's epoch
_INNER = ("sampler", "batch_sampler", "data_sampler")  # the last is that of DeepSpeed's loader


def _parts(loaders: list[Any]) -> list[Any]:
    """Return the loaders and their samplers. A sampler may be wrapped several times."""
    found: list[Any] = []
    waiting = list(loaders)
    while waiting:
        part = waiting.pop(0)
        if part is not None and not any(part is each for each in found):
            found.append(part)
            waiting += [getattr(part, name, None) for name in _INNER]
    return found


class Replayed:
    """Where this rank is in one train loader, as part of the state of a run.

    The way back is a replay: the random state at which the epoch began is set, and the batches that have been used are fetched
    and dropped. A dataset that is iterated must not draw its order from the random numbers of the training process after the
    first batch. Loading the state only notes it: the first call of `batches` then goes to the position. It raises
    `InvalidSpec` if the state was saved with another number of replicas."""

    def __init__(self, run: hf.Run) -> None:
        self._run = run
        self._loader: Any = None
        self._used = 0  # batches of this epoch that the script has got
        self._at_iterator: Moment | None = None
        self._passes: int | None = None  # that the loader had begun before this epoch, if it counts them
        self._resume = False
        self.epoch = 0
        self.on_epoch: Callable[[], None] = lambda: None

    @property
    def at_end(self) -> bool:
        try:
            return self._used >= len(self._loader)
        except TypeError:  # an iterable dataset, or none yet
            return False

    def state_dict(self) -> dict[str, Any]:
        if self._at_iterator is None and self._loader is not None:
            self._enter(self._loader)  # between two epochs
        at_iterator = None if self._at_iterator is None else self._at_iterator.as_plain()
        replicas = self._run.world.dp_size
        position = {"epoch": self.epoch, "used": self._used, "passes": self._passes, "at_iterator": at_iterator}
        return {"replicas": replicas, **position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        require_same_replicas(state["replicas"], self._run)
        self.epoch, self._used, self._passes = state["epoch"], state["used"], state["passes"]
        if state["at_iterator"] is not None:
            self._at_iterator, self._resume = Moment(**state["at_iterator"]), True

    def batches(self, loader: Any, before_fetch: Callable[[], object]) -> Iterator[Any]:
        """Return the batches of one epoch; in the restored one, those that are left. `before_fetch` is called before each.

        Raises `Conflict` for another loader than the first."""
        require_same_loader(loader, self._loader)
        self._loader = loader
        iterator = self._continue(loader) if self._resume else self._begin(loader)
        while True:
            before_fetch()
            try:
                with self._run.data_wait():
                    batch = next(iterator)
            except StopIteration:
                break
            self._used += 1
            yield batch
        self.epoch += 1
        self._used, self._at_iterator = 0, None

    def _begin(self, loader: Any) -> Iterator[Any]:
        self._enter(loader)
        self.on_epoch()
        return iter(loader)

    def _enter(self, loader: Any) -> None:
        """The position is the beginning of an epoch."""
        self._used, self._at_iterator = 0, Moment.now([loader])
        self._passes = getattr(loader, PASSES, None)

    def _continue(self, loader: Any) -> Iterator[Any]:
        self._resume = False
        assert self._at_iterator is not None
        if self._used:
            log.info("replaying %d batches to the restored position", self._used)
        if self._passes is not None:
            setattr(loader, PASSES, self._passes)
        with self._run.phase(Phase.RESTORE):
            self._at_iterator.restore([loader])
            iterator: Iterator[Any] = iter(loader)
            for _ in range(self._used):
                next(iterator)
        if self._used:  # a save before the first batch was made before the iterator, which draws a seed
            self._run.reapply_rng()
        return iterator
