"""Saves and restores the order in which DDP sums gradients, so that a restored run sums like the uninterrupted one.

Theory. DistributedDataParallel all-reduces gradients in buckets. The buckets of its first step differ from those of all later
steps: after the first backward pass it rebuilds them in the order in which rank 0's gradients became ready. The place of an
element in its bucket determines the order in which the ranks' values are added. With more than two ranks another order gives
other last bits. A restored process starts with a new DDP, whose first step would sum in an order that the uninterrupted run
did not use.

So a checkpoint contains the order of each DDP module, and a restored run replays it before its first step: one backward pass
that reports every parameter as ready in that order, with zero gradients, after which DDP builds its buckets as usual. The
replay runs no user hook, draws no random number, and does not change parameters, buffers and gradients. It costs one
all-reduce of the size of the gradients. The ranks of a module's process group first agree that each of them can do it.

DDP provides the order through private parts of torch (identical from 2.6 to 2.13), so every use is guarded: if a run cannot be
made exact, it continues with one warning. The replay is not needed for up to two ranks, whose sum has only one order, and with
`find_unused_parameters=True`, with which DDP never rebuilds its buckets."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger("holdfast.train")

ONE_ORDER_RANKS_MAX = 2  # a + b is b + a

# Keys of the order in DDP's own log: that of the buckets and, until they are built, that of the last backward pass.
BUCKETS = "rebuilt_per_bucket_param_indices"
LAST_BACKWARD = "prev_iteration_grad_ready_order_indices"

_IMPOSSIBLE, _NOTHING_TO_DO, _POSSIBLE = range(3)

# Communication hooks without state, which treat each element in the same way. Others may keep state between calls.
_PLAIN_HOOKS = {"allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"}
_PLAIN_HOOKS_MODULE = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"


class DDPBuckets:
    """The DDP modules of this process in the order of their construction, which is the same on all ranks of a group."""

    def __init__(self) -> None:
        self._modules: list[weakref.ref[DistributedDataParallel]] = []
        self._orders: weakref.WeakKeyDictionary[DistributedDataParallel, list[int]] = weakref.WeakKeyDictionary()
        self._saved: Sequence[Sequence[int] | None] | None = None  # orders of the checkpoint, until they are replayed
        self._hook = register_module_module_registration_hook(self._registered)

    def close(self) -> None:
        self._hook.remove()

    def _registered(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if name == "module" and isinstance(module, DistributedDataParallel):
            self._modules.append(weakref.ref(module))

    def _living(self) -> Iterator[DistributedDataParallel]:
        for reference in self._modules:
            module = reference()
            if module is not None and _rebuilds(module):
                yield module

    def capture(self) -> list[list[int] | None]:
        """Return the order of each module's parameters, by number; None if no backward pass has determined it yet."""
        return [self._order_of(module) for module in self._living()]

    def _order_of(self, module: DistributedDataParallel) -> list[int] | None:
        if module not in self._orders:
            logged = _logging_data(module)
            if BUCKETS not in logged:
                return _numbers(logged.get(LAST_BACKWARD))
            self._orders[module] = _numbers(logged[BUCKETS]) or []  # permanently: DDP rebuilds only once
        return self._orders[module] or None

    def restored(self, saved: Sequence[Sequence[int] | None] | None) -> None:
        """Accept the value of `capture` from the checkpoint; None if the checkpoint has no such value."""
        self._saved = saved

    def replay(self) -> None:
        """Replay the order. Call this before the first step of a restored run. Collective over each module's process group."""
        saved, self._saved = self._saved, None
        if saved is None:
            return
        modules = list(self._living())
        reasons = []
        for number, module in enumerate(modules):
            if dist.get_world_size(module.process_group) <= ONE_ORDER_RANKS_MAX:
                continue
            order = saved[number] if len(saved) == len(modules) else ()
            why_not = _why_not(module, order)
            can = _IMPOSSIBLE if why_not else _NOTHING_TO_DO if order is None else _POSSIBLE
            match _least_and_most(module, can):
                case (least, most) if least == most == _POSSIBLE and order:
                    _replay(module, order)
                    self._orders[module] = list(order)
                case (least, most) if not least == most == _NOTHING_TO_DO:
                    reasons.append(why_not or "another rank cannot set the order")
        if reasons:
            log.warning(
                "The first step after this restore sums the gradients of DistributedDataParallel in another order than the "
                "uninterrupted run would have, so weights may differ from it in their last bits: %s. With "
                "find_unused_parameters=True, and static_graph=False, the order is always the same",
                "; ".join(dict.fromkeys(reasons)),
            )


def _rebuilds(module: DistributedDataParallel) -> bool:
    """Whether this module rebuilds its buckets after its first backward pass."""
    by_reducer = hasattr(module, "reducer") and not getattr(module, "_use_python_reducer", False)
    return by_reducer and (module.static_graph or not module.find_unused_parameters)


def _logging_data(module: DistributedDataParallel) -> dict[str, Any]:
    """Return DDP's own log, updated if it does not contain the buckets yet; empty if this torch has no such log."""
    private: Any = module
    try:
        logged: dict[str, Any] = private._get_ddp_logging_data()
        if BUCKETS not in logged:
            private.logger.set_runtime_stats_and_log()  # DDP does this at the beginning of the next forward pass
            logged = private._get_ddp_logging_data()
    except (AttributeError, RuntimeError, TypeError):
        return {}
    return logged


def _numbers(text: str | None) -> list[int] | None:
    return [int(number) for number in text.replace(",", " ").split()] if text else None


def _why_not(module: DistributedDataParallel, order: Sequence[int] | None) -> str:
    """Return the reason why the order cannot be set; "" if it can."""
    logged = _logging_data(module)
    hooks = getattr(module, "_comm_hooks", ())
    parameters = list(module.module.parameters())
    if not logged or not hasattr(module.reducer, "_autograd_hook"):
        return f"torch {torch.__version__} has no interface to set the order"
    if module.static_graph:
        return "static_graph=True fixes the order in the second step"
    if BUCKETS in logged or LAST_BACKWARD in logged:
        return "there was a backward pass before the first run.step"
    if module.mixed_precision is not None:
        return "DDP's mixed_precision is used"
    if not all(_is_plain(hook) for hook, _ in hooks):
        return "a communication hook is registered that may keep a state"
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters):
        return "an optimizer runs in the backward pass"
    if any(getattr(child, "sparse", False) for child in module.module.modules()):
        return "there are sparse gradients"
    if order is not None and sorted(order) != list(range(logged["num_parameter_tensors"])):
        return "the checkpoint was saved with other modules"
    return ""


def _is_plain(hook: Any) -> bool:
    return getattr(hook, "__module__", "") == _PLAIN_HOOKS_MODULE and hook.__name__ in _PLAIN_HOOKS


def _least_and_most(module: DistributedDataParallel, can: int) -> tuple[int, int]:
    """Return the minimum and the maximum over the ranks of the module's process group."""
    both = torch.tensor([can, -can], device=module.device)
    dist.all_reduce(both, dist.ReduceOp.MIN, group=module.process_group)
    least, most = both.tolist()
    return least, -most


class _Ready(torch.autograd.Function):
    """Run a backward pass that only reports the parameters as ready, in the given order."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, reducer: Any, order: Iterable[int]) -> torch.Tensor:
        ctx.reducer, ctx.order = reducer, order
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        for number in ctx.order:
            ctx.reducer._autograd_hook(number)
        return None, None, None


def _replay(module: DistributedDataParallel, order: Sequence[int]) -> None:
    parameters = [parameter for parameter in module.module.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    with torch.enable_grad():
        anchor = torch.zeros((), device=module.device, requires_grad=True)
        done = _Ready.apply(anchor, module.reducer, order)  # type: ignore[no-untyped-call]
        module.reducer.prepare_for_backward([])
        done.backward()
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
