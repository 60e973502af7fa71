"""Measures how long this rank waited for other ranks in DistributedDataParallel's all-reduces, with DDP's own timers.

Theory. DDP's C++ reducer records when the backward pass has computed its last gradient, and when the last all-reduce has ended.
The time between the two is this rank's wait: its own work is done, and it cannot continue before the other ranks have arrived.
The other ranks wait for the rank that waits least. The measurement synchronises nothing: on CPU the reducer reads a clock a
few times in a step, and the result is copied after the backward pass.

On CUDA the times are those of events on the device, so they are correct although calls return before the work is done. DDP
reads them in the next forward pass and waits for the device there. It therefore times only its first ten steps and every
hundredth one, and this module does not change that. (The flight recorder of torch 2.13 is not sufficient: for gloo it records
when a collective was entered, but not when it ended.)

Private parts of torch are used, so every use is guarded: a module that cannot be read is skipped."""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

log = logging.getLogger("holdfast.train")

_COMPUTED = "backward_compute_time_end"
_REDUCED = "backward_comm_time_end"  # both Unix nanoseconds
_REDUCING = "backward_comm_time"  # nanoseconds from the first all-reduce to the end of the last one
_HIDDEN = "backward_compute_comm_overlap_time"  # the part of `_REDUCING` in which this rank still computed


DEFAULT_EVERY = 100  # DDP times every 100th step by default, and the first ten


class _Timed:
    """One DDP module, and the end of the backward pass that was read last."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self.module = weakref.ref(module)
        self.every = DEFAULT_EVERY
        self.read_ns = 0


class DDPWaits:
    """The waits of all DDP modules that this process builds between the construction of this object and `close`."""

    def __init__(self) -> None:
        self._modules: list[_Timed] = []
        self._hook = register_module_module_registration_hook(self._registered)

    def close(self) -> None:
        self._hook.remove()
        self.rest()
        self._modules.clear()

    def rest(self) -> None:
        """Make DDP time only as many steps as by default, until the next `take`."""
        for timed in self._modules:
            module: Any = timed.module()
            if module is not None and timed.every != DEFAULT_EVERY:
                with suppress(AttributeError, RuntimeError):
                    module._set_ddp_runtime_logging_sample_rate(DEFAULT_EVERY)
                timed.every = DEFAULT_EVERY

    def _registered(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if name == "module" and isinstance(module, DistributedDataParallel):
            self._modules.append(_Timed(module))

    def take(self, every: int = 1, *, on_cpu_only: bool = False) -> float | None:
        """Return the seconds waited in each module's newest timed backward pass, if that is newer than the last call; None if
        no module has one.

        `every`: on CPU, one step in `every` is timed. `on_cpu_only`: skip modules on other devices, which DDP times as by
        default. A backward pass that is not synchronised (`no_sync`) has no wait."""
        waited_s: float | None = None
        for timed in tuple(self._modules):
            module = timed.module()
            if module is None:
                self._modules.remove(timed)
                continue
            try:
                of_module_s = _wait_s(timed, module, every, on_cpu_only)
            except (AttributeError, KeyError, RuntimeError, TypeError) as error:
                log.info("cannot read how long DDP of this torch has waited (%r)", error)
                self._modules.remove(timed)
                continue
            if of_module_s is not None:
                waited_s = (waited_s or 0.0) + of_module_s
        return waited_s


def _wait_s(timed: _Timed, module: DistributedDataParallel, every: int, on_cpu_only: bool) -> float | None:
    private: Any = module
    on_cpu = private.device_type == "cpu"
    if on_cpu_only and not on_cpu:
        return None
    if on_cpu and timed.every != every:
        private._set_ddp_runtime_logging_sample_rate(every)
        timed.every = every
    if on_cpu and every == 1:
        private.logger.set_runtime_stats_and_log()  # DDP does this itself at the beginning of the next forward pass
    logged = private.logger._get_ddp_logging_data().ints_map
    reduced_ns = int(logged.get(_REDUCED, 0))
    if reduced_ns <= timed.read_ns:
        return None
    timed.read_ns = reduced_ns
    waited_ns = reduced_ns - logged[_COMPUTED] if on_cpu else logged[_REDUCING] - logged[_HIDDEN]
    return float(max(0, waited_ns)) / 1e9
