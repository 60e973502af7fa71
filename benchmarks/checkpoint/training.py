"""The training and the saved state: a GPT's parameters with two Adam moments each, and an independent training step in Python.

The step does not use the state, so that every contender pays only for its own work. The step consists of small torch operations
in long Python loops (about 5 ms), and is therefore slowed down by everything that takes the GIL or the core.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

LAYERS = 10
VOCABULARY = 16_384
CONTEXT = 1024
FLOAT_BYTES = 4
COPIES = 3  # parameters, first and second moment
STAMP_STRIDE = 16_384  # one element per 64 KiB is stamped, which shows torn page ranges and costs little bandwidth

BLOCKS = 150  # blocks of the small model whose steps are timed
BLOCK_WIDTH = 64


def gpt_shapes(width: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the parameters, in GPT-2's layout."""
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (VOCABULARY, width), "wpe.weight": (CONTEXT, width)}
    for layer in range(LAYERS):
        for name, shape in (
            ("ln_1", (width,)),
            ("attn.c_attn", (3 * width, width)),
            ("attn.c_proj", (width, width)),
            ("ln_2", (width,)),
            ("mlp.c_fc", (4 * width, width)),
            ("mlp.c_proj", (width, 4 * width)),
        ):
            shapes[f"h.{layer}.{name}.weight"] = shape
            shapes[f"h.{layer}.{name}.bias"] = shape[:1]
    return shapes | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def width_for(nbytes: int) -> int:
    """Return the width, a multiple of 8, whose state is nearest to `nbytes`."""
    quadratic, linear = 12 * LAYERS, VOCABULARY + CONTEXT
    floats = nbytes / FLOAT_BYTES / COPIES
    exact = (math.sqrt(linear**2 + 4 * quadratic * floats) - linear) / (2 * quadratic)
    return max(8, round(exact / 8) * 8)


class State:
    """The tensors, nested as a training script would save them: `{"model": …, "optim": {"exp_avg": …, …}}`."""

    def __init__(self, nbytes: int) -> None:
        shapes = gpt_shapes(width_for(nbytes))

        def fresh() -> dict[str, torch.Tensor]:
            return {name: torch.full(shape, 0.5) for name, shape in shapes.items()}

        self.tree: dict[str, Any] = {
            "model": fresh(),
            "optim": {"exp_avg": fresh(), "exp_avg_sq": fresh(), "step": torch.zeros(1)},
        }
        optim = self.tree["optim"]
        self.tensors: list[torch.Tensor] = [
            *self.tree["model"].values(),
            *optim["exp_avg"].values(),
            *optim["exp_avg_sq"].values(),
            optim["step"],
        ]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def stamp(self, mark: int) -> None:
        """Write stamps of `mark` and the tensor's number, spread over every tensor."""
        for index, tensor in enumerate(self.tensors):
            tensor.view(-1)[::STAMP_STRIDE].fill_(_stamp(mark, index))

    def torn(self, mark: int) -> int:
        """Return the number of tensors with a stamp other than that of `mark`."""
        return sum(
            not bool((tensor.view(-1)[::STAMP_STRIDE] == _stamp(mark, index)).all())
            for index, tensor in enumerate(self.tensors)
        )


def _stamp(mark: int, index: int) -> float:
    return float(mark * 1000 + index)  # exact in fp32 as long as mark is below 16,000


class Work:
    """One training step: forward, backward and an optimizer written out in Python."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self._weights = [
            (torch.randn(BLOCK_WIDTH, BLOCK_WIDTH, generator=generator) / BLOCK_WIDTH**0.5).requires_grad_()
            for _ in range(BLOCKS)
        ]
        self._momenta = [torch.zeros_like(weight) for weight in self._weights]
        self._inputs = torch.randn(16, BLOCK_WIDTH, generator=generator)

    def step(self) -> None:
        hidden = self._inputs
        for weight in self._weights:
            hidden = torch.tanh(hidden @ weight)
        loss = (hidden - self._inputs).square().mean()
        gradients = torch.autograd.grad(loss, self._weights)
        with torch.no_grad():
            for weight, momentum, gradient in zip(self._weights, self._momenta, gradients, strict=True):
                momentum.mul_(0.9).add_(gradient)
                scale = 1.0 / (1.0 + float(momentum.abs().mean()))
                weight.add_(momentum, alpha=-1e-3 * scale)


@dataclass(frozen=True, slots=True)
class StepTime:
    began_at: float  # time.monotonic
    duration_s: float


class Loop:
    """Runs and times steps. `around` wraps a step, `after` is called in it, so that the contender's cost is included."""

    def __init__(self, around: Callable[[int], AbstractContextManager[object]], after: Callable[[], object]) -> None:
        self._work = Work()
        self._around = around
        self._after = after
        self.done = 0

    def steps(self, count: int) -> list[StepTime]:
        return [self._one() for _ in range(count)]

    def until(self, over: Callable[[], bool], timeout_s: float) -> list[StepTime]:
        """Run steps until `over`. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        times: list[StepTime] = []
        while not over():
            times.append(self._one())
            if times[-1].began_at > deadline:
                raise TimeoutError(f"the save was not durable {timeout_s:.0f} s after it began")
        return times

    def _one(self) -> StepTime:
        began = time.monotonic()
        with self._around(self.done):
            self._work.step()
        self._after()
        self.done += 1
        return StepTime(began, time.monotonic() - began)
