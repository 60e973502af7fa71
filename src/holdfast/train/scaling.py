"""The learning rate when the global batch changes with the number of replicas: linear and square-root scaling.

By default the global batch stays constant across a resize (`ElasticSampler`), and so does the learning rate: nothing here is
needed. A script whose replicas keep their own batch trains with a smaller or larger global batch after a resize, and one of two
rules adapts the learning rate to it:

    per_replica = 32
    batch = per_replica * run.world.dp_size
    data = hf.ElasticSampler(n_samples, global_batch=batch, world=run.world)
    rate = hf.scaling.linear(optimizer, batch=batch, reference_batch=256)   # lr of the optimizer is meant for 256 samples

* `linear`: lr ∝ batch. SGD with momentum: Goyal et al. 2017, "Accurate, Large Minibatch SGD", section 2.1. PyTorch's SGD needs
  no momentum correction (their remark 2), because its momentum buffer does not contain the learning rate.
* `square_root`: lr ∝ √batch, which keeps the variance of the update: Krizhevsky 2014, "One weird trick for parallelizing
  convolutional neural networks", section 5; Hoffer et al. 2017, "Train longer, generalize better", section 4. Also used for
  Adam: Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms".

Theory. The factor is a function of two batch sizes only. It is applied while `optimizer.step` runs: before and after, the
parameter groups have the unscaled learning rate. Schedulers therefore compute as if nothing was scaled, checkpoints contain
only unscaled values, and no number of restarts or resizes applies a factor twice: after 3 → 2 → 3 replicas, the learning rate
has the same bits as in a run that was never resized, with every scheduler.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from holdfast.domain.errors import InvalidSpec

_SCALED_BY = "_holdfast_scaled_by"


def linear_factor(batch: int, reference_batch: int) -> float:
    """Return batch / reference_batch, both in samples. Raises `InvalidSpec` if one of them is not positive."""
    _check(batch, reference_batch)
    return batch / reference_batch


def square_root_factor(batch: int, reference_batch: int) -> float:
    """Return √(batch / reference_batch), both in samples. Raises `InvalidSpec` if one of them is not positive."""
    _check(batch, reference_batch)
    return math.sqrt(batch / reference_batch)


def linear(optimizer: torch.optim.Optimizer, *, batch: int, reference_batch: int) -> ScaledRate:
    """Scale the learning rate of every parameter group by batch / reference_batch.

    `batch`: samples of a global step in this run, over all replicas. `reference_batch`: the global batch that the optimizer's
    learning rate is meant for. Call it once per start, before or after `run.restore` and the construction of schedulers. A
    second call for the same optimizer replaces the first. Raises `InvalidSpec` if a batch is not positive, or if `optimizer`
    is not a `torch.optim.Optimizer`."""
    return ScaledRate(optimizer, linear_factor(batch, reference_batch))


def square_root(optimizer: torch.optim.Optimizer, *, batch: int, reference_batch: int) -> ScaledRate:
    """Scale the learning rate of every parameter group by √(batch / reference_batch); otherwise like `linear`."""
    return ScaledRate(optimizer, square_root_factor(batch, reference_batch))


class ScaledRate:
    """Multiplies the learning rates of one optimizer by `factor` while it steps.

    `optimizer.param_groups[i]["lr"]` and `scheduler.get_last_lr()` show the unscaled values; `rates` are the scaled ones."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Raises `InvalidSpec` if `factor` is not positive and finite, or if `optimizer` is not torch's."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidSpec("optimizer", type(optimizer).__name__, "a torch.optim.Optimizer")
        if not 0 < factor < math.inf:
            raise InvalidSpec("factor", factor, "a positive, finite number")
        earlier = getattr(optimizer.step, _SCALED_BY, None)
        if isinstance(earlier, ScaledRate):
            earlier.remove()
        self.factor = factor
        self._optimizer = optimizer
        self._removed = False
        optimizer.step = self._wrapped(optimizer.step)  # type: ignore[method-assign]  # as torch's schedulers do

    @property
    def rates(self) -> tuple[float, ...]:
        """The learning rate of each parameter group in the next step. A rate that is a tensor is read, which waits for its
        device."""
        factor = 1.0 if self._removed else self.factor
        return tuple(float(group["lr"] * factor) for group in self._optimizer.param_groups)

    def remove(self) -> None:
        """Stop scaling. A second call does nothing."""
        self._removed = True

    def _wrapped(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A method, because schedulers that are constructed later expect one. Wrapping the step, unlike torch's hooks around
        it, also covers a step that raises and one that calls the step of its base class."""

        @functools.wraps(getattr(step, "__func__", step))
        def scaled_step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            if self._removed:
                return step(*args, **kwargs)
            lent = [(group, group["lr"], group["lr"] * self.factor) for group in optimizer.param_groups]
            for group, _, scaled in lent:
                group["lr"] = scaled
            try:
                result = step(*args, **kwargs)
                if any(group["lr"] is not scaled for group, _, scaled in lent):
                    name = type(optimizer).__name__
                    raise InvalidSpec(
                        "optimizer",
                        name,
                        "an optimizer that does not set its learning rate in step(), since it is scaled",
                    )
                return result
            finally:
                for group, unscaled, _ in lent:
                    group["lr"] = unscaled

        setattr(scaled_step, _SCALED_BY, self)
        return MethodType(scaled_step, self._optimizer)


def _check(batch: int, reference_batch: int) -> None:
    for name, value in (("batch", batch), ("reference_batch", reference_batch)):
        if value < 1:
            raise InvalidSpec(name, value, "at least one sample")
