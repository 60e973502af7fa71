"""The script's callbacks around a change of the generation: `run.on_resize` after it, `run.on_leaving` before it.

Both are called where the state is consistent on all ranks: `on_resize` after the restore, before the first step; `on_leaving`
after the step that the next generation will continue from, before that step is saved."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from holdfast.domain.mesh import Mesh
from holdfast.train.environment import World

log = logging.getLogger("holdfast.train")

# Limit of all callbacks of a rank together; less than the supervisor waits for the checkpoint of a planned change (10 s).
LEAVING_TIMEOUT_S: Final = 5.0

OnResize = Callable[[World, World], None]


@dataclass(frozen=True, slots=True)
class Leaving:
    """A planned change that is about to end this process."""

    step: int  # steps finished; the state of this step is saved next, and the run continues from it
    reason: str  # for people: "scale_up: node-3 is back"


OnLeaving = Callable[[Leaving], None]


def is_resize(old: Mesh, new: Mesh) -> bool:
    """Whether a dimension has another size. A dimension of size 1 and the order of dimensions do not count."""
    return _sizes(old) != _sizes(new)


def _sizes(mesh: Mesh) -> dict[str, int]:
    return {name: size for name, size in mesh.dims if size > 1}


class Resizes:
    """Calls every `on_resize` callback once: in the restore, or at once if it is registered later."""

    def __init__(self) -> None:
        self._waiting: list[OnResize] = []
        self._change: tuple[World, World] | None = None

    def add(self, callback: OnResize) -> None:
        if self._change is not None:
            _resized(callback, *self._change)
        else:
            self._waiting.append(callback)

    def happened(self, old: World, new: World) -> None:
        self._change = old, new
        while self._waiting:
            _resized(self._waiting.pop(0), old, new)


def _resized(callback: OnResize, old: World, new: World) -> None:
    try:
        callback(old, new)
    except Exception as error:
        error.add_note(
            f"raised by the on_resize callback {_name(callback)}, for the resize from {old.mesh} to {new.mesh}"
        )
        raise


class Leavings:
    """Calls the `on_leaving` callbacks of this rank, in a thread that training waits for up to `timeout_s`."""

    def __init__(self, device: torch.device, timeout_s: float = LEAVING_TIMEOUT_S) -> None:
        self._device = device
        self._timeout_s = timeout_s
        self._callbacks: list[OnLeaving] = []
        self._thread: _Caller | None = None

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def add(self, callback: OnLeaving) -> None:
        self._callbacks.append(callback)

    def call(self, leaving: Leaving, timeout_s: float | None = None) -> None:
        """Call all of them in the order of registration. Never raises; returns after at most `timeout_s`."""
        limit_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        if self._thread is not None and self._thread.is_alive():
            log.error("on_leaving: %s is still running from the previous call; none is called", self._thread.running)
            return
        self._thread = _Caller(tuple(self._callbacks), leaving, self._device)
        self._thread.start()
        self._thread.join(max(0.0, limit_s))
        if self._thread.is_alive():
            self._thread.overran = True
            log.error(
                "the on_leaving callback %s did not return within %.1f s: step %d is saved without waiting for it",
                self._thread.running,
                limit_s,
                leaving.step,
            )


class _Caller(threading.Thread):
    """A daemon: a callback that never returns does not keep the process alive."""

    def __init__(self, callbacks: tuple[OnLeaving, ...], leaving: Leaving, device: torch.device) -> None:
        super().__init__(name="holdfast-leaving", daemon=True)
        self._callbacks = callbacks
        self._leaving = leaving
        self._device = device
        self.running = ""
        self.overran = False

    def run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has its own current device
        for callback in self._callbacks:
            if self.overran:
                log.error("the on_leaving callback %s is not called: an earlier one overran", _name(callback))
                continue
            self.running = _name(callback)
            try:
                callback(self._leaving)
            except Exception:
                log.exception(
                    "the on_leaving callback %s failed; the change goes on: %s", self.running, self._leaving.reason
                )


def _name(callback: Callable[..., Any]) -> str:
    """Return function, file and line; only the type for a partial or an object with `__call__`, which have no code."""
    code = getattr(callback, "__code__", None)
    name = getattr(callback, "__qualname__", type(callback).__qualname__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name
