"""One pipeline step over plain point-to-point messages: all micro-batches forward, then all backward.

Sends are asynchronous, receives are not, and every pair of neighbours exchanges first activations, then gradients, in
the order of the micro-batches. Only that order must match, so gloo and NCCL both work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Pipeline:
    """`stage` is this rank's part of the model; `ranks` are the global ranks of all stages of this replica, in order.

    `waiting()` surrounds every receive, to measure the time spent waiting.
    """

    def __init__(
        self,
        stage: nn.Module,
        index: int,
        ranks: Sequence[int],
        width: int,
        waiting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.stage = stage
        self.is_first = index == 0
        self.is_last = index == len(ranks) - 1
        self._before = None if self.is_first else ranks[index - 1]
        self._after = None if self.is_last else ranks[index + 1]
        self._width = width
        self._waiting = waiting

    def step(
        self, inputs: Sequence[Tensor], targets: Sequence[Tensor], loss_of: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Forward and backward over the micro-batches; gradients accumulate in the parameters.

        `inputs` are used by the first stage, `targets` by the last; both are [batch, seq] on every rank, for the shapes.
        Returns the summed loss, which is 0 except on the last stage.
        """
        total = torch.zeros((), device=inputs[0].device)
        received: list[Tensor] = []
        produced: list[Tensor] = []
        sending: list[tuple[dist.Work | None, Tensor]] = []  # a tensor lives until it is sent
        for tokens, target in zip(inputs, targets, strict=True):
            x = tokens if self._before is None else self._receive(tokens, self._before)
            y = self.stage(x)
            if self._after is None:
                y = loss_of(y, target)
                total += y.detach()
            else:
                sending.append(_send(y.detach(), self._after))
            received.append(x)
            produced.append(y)
        for x, y in zip(received, produced, strict=True):
            y.backward(None if self._after is None else self._receive(x, self._after, requires_grad=False))
            if self._before is not None:
                assert x.grad is not None
                sending.append(_send(x.grad, self._before))
        for work, _ in sending:
            if work is not None:
                work.wait()
        return total

    def _receive(self, like: Tensor, source: int, *, requires_grad: bool = True) -> Tensor:
        batch, seq = like.shape[:2]
        x = torch.empty(batch, seq, self._width, device=like.device)
        with self._waiting():
            dist.recv(x, source)
        return x.requires_grad_(requires_grad)


def _send(tensor: Tensor, to: int) -> tuple[dist.Work | None, Tensor]:
    tensor = tensor.contiguous()
    return dist.isend(tensor, to), tensor
