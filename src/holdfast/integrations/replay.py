"""Random states at which a data loader gives the same batches again: to replay an epoch up to a position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from holdfast.train import rng


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


_INNER = ("sampler", "batch_sampler")


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
