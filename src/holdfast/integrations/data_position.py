"""Checks that a loop continues with the data position of its checkpoint."""

from __future__ import annotations

import holdfast.train as hf
from holdfast.domain.errors import Conflict, InvalidSpec


def require_same_replicas(saved: int, run: hf.Run) -> None:
    """Raises `InvalidSpec` if the checkpoint was saved by another number of data-parallel replicas, `saved`, than `run` has."""
    if saved != run.world.dp_size:
        raise InvalidSpec(
            "replicas",
            run.world.dp_size,
            f"{saved}, with which the checkpoint was saved: it holds each rank's position in the data",
        )


def require_same_loader(loader: object, first: object | None) -> None:
    """Raises `Conflict` if `loader` is not the loader of the first call, `first`; None = this is the first call."""
    if first is not None and loader is not first:
        raise Conflict(
            "run.batches was given another loader before: the position of one train loader is part of the state"
        )
