"""Megatron-Core without a GPU: tensors that ask for CUDA are made on the host, and the tracker of random numbers uses torch's
generator of the host. To be imported before Megatron-Core's models are made."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

warnings.filterwarnings("ignore")  # Transformer Engine and Apex are not installed

from megatron.core.tensor_parallel import random as tracked  # noqa: E402


class OnHost(TorchFunctionMode):
    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if "cuda" in str(given.get("device", "")):
            given["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1:
            return str(function(*args)).replace("torch.", "torch.cuda.")  # the optimizer asks for CUDA's types by name
        return function(*args, **given)


def enter() -> None:
    """For the rest of this process."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.synchronize = lambda *_: None
    cuda.manual_seed, cuda.get_rng_state = torch.manual_seed, torch.get_rng_state
    tracked._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    tracked._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    logging.getLogger(tracked.__name__).setLevel(logging.ERROR)
    OnHost().__enter__()  # type: ignore[no-untyped-call]
