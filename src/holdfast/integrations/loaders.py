"""Position of a data loader that belongs to one rank, such as torchdata's `StatefulDataLoader`.

    loader = StatefulDataLoader(...)
    state = {"model": model, "optim": optim, "data": PerRank(loader, run.world)}

`loader.state_dict()` describes what this rank has read. That is exact as long as the number of replicas does not change. With
another number, samples would be skipped and repeated, so loading is refused then: use `hf.ElasticSampler` for a job that
changes its size.

The state is one value of bytes, because DCP loads only those keys that the state of the new, unused object already has, and a
loader that has not been used has fewer."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from holdfast.domain.errors import InvalidSpec
from holdfast.train import World
from holdfast.train.saves.state import collect, disassemble

__all__ = ["PerRank"]


class Positioned(Protocol):
    """A loader that knows its position."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> Any: ...


class PerRank:
    """The position of `loader` as part of the state of a run.

    Make the loader's iterator after the restore, then call `run.reapply_rng()`, because making it draws a random number.
    Raises `InvalidSpec` for a loader without `state_dict` and `load_state_dict`, and when the position was saved with another
    number of replicas."""

    def __init__(self, loader: Positioned, world: World) -> None:
        for name in ("state_dict", "load_state_dict"):
            if not callable(getattr(loader, name, None)):
                raise InvalidSpec(
                    "loader",
                    f"{type(loader).__qualname__} without {name}",
                    "a loader that knows its position, as torchdata.stateful_dataloader.StatefulDataLoader",
                )
        self._loader = loader
        self._world = world

    def state_dict(self) -> dict[str, Any]:
        buffer = io.BytesIO()
        # taken apart as any other state, so that a value that could not be restored is refused now, with its path
        position = collect({"loader": self._loader.state_dict()})
        torch.save((position.extra, position.tensors), buffer)
        return {"position": {"replicas": self._world.dp_size, "state": buffer.getvalue()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        position = state["position"]
        if position["replicas"] != self._world.dp_size:
            raise InvalidSpec(
                "replicas",
                self._world.dp_size,
                f"{position['replicas']}, with which the position of {type(self._loader).__qualname__} was saved: it is that "
                "of one rank. A job that changes its number of replicas needs hf.ElasticSampler",
            )
        read = torch.load(io.BytesIO(position["state"]), weights_only=True)
        if isinstance(read, tuple):
            extra, tensors = read
            read = disassemble(extra, lambda name, _: tensors[name])[0]["loader"]
        self._loader.load_state_dict(read)  # earlier releases saved the loader's state as it is
