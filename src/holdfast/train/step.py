"""One step of the loop of the training script (`hf.Step`), and the exception that ends the loop by order (`hf.Interrupted`)."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch

from holdfast.domain import worker


class Interrupted(SystemExit):
    """Raised when the agent, or SIGTERM, requests this run to stop. Ends an unmodified script with `worker.EXIT_INTERRUPTED`,
    without a traceback."""

    def __init__(self, step: int, saved: bool) -> None:
        super().__init__(worker.EXIT_INTERRUPTED)
        self.step = step  # steps finished
        self.saved = saved  # whether the state of `step` was saved before the exit

    def __str__(self) -> str:
        return f"stopped after step {self.step}" + (", which was saved" if self.saved else "")


class Step:
    """One step in progress, from `with run.step(step) as s`."""

    __slots__ = (
        "_finish",
        "comm_wait_s",
        "data_s",
        "flops",
        "grad_norm",
        "local_grad_norm",
        "loss",
        "stall_s",
        "started_at",
        "tokens",
    )

    def __init__(self, finish: Callable[[Step], None]) -> None:
        """`finish` is called with this step at the end of its block, if no exception was raised there."""
        self._finish = finish
        self.started_at = time.time()
        self.data_s = 0.0
        self.comm_wait_s: float | None = None  # None = not measured
        self.stall_s = 0.0  # blocked by saves since the step before
        self.tokens = 0
        self.flops = 0.0
        self.loss: float | None = None
        self.grad_norm: float | None = None
        self.local_grad_norm: float | None = None

    def log(
        self,
        *,
        loss: float | torch.Tensor | None = None,
        grad_norm: float | torch.Tensor | None = None,
        local_grad_norm: float | torch.Tensor | None = None,
        tokens: int = 0,
        flops: float = 0.0,
    ) -> None:
        """Report values of this step. The job's loss is the mean over the ranks that report one, its tokens and FLOPs are the
        sum. `flops`: floating-point operations of the model for this rank's part of the step, forward and backward, without
        recomputation; reports compute MFU from them.

        `local_grad_norm` is the norm of this rank's own gradient before the reduction, with which a rank that computes wrong
        values can be identified. A tensor is read at once, which waits for its device."""
        if loss is not None:
            self.loss = _number(loss)
        if grad_norm is not None:
            self.grad_norm = _number(grad_norm)
        if local_grad_norm is not None:
            self.local_grad_norm = _number(local_grad_norm)
        self.tokens += tokens
        self.flops += flops

    def __enter__(self) -> Step:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self._finish(self)


class Owner(Protocol):
    """The object that creates and ends a run: `holdfast.train.wiring`."""

    def join(self) -> None: ...
    def close(self, error: BaseException | None = None) -> None: ...


def _number(value: float | torch.Tensor) -> float:
    return float(value.detach() if isinstance(value, torch.Tensor) else value)
