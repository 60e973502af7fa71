"""Prepare functions: the worker template loads data once that a script would load at every start; its workers share it.

    # mypkg/data.py                                     # train.py
    def prepare() -> Loaded:                            from mypkg.data import prepare
        return Loaded(tokenizer, index, model)          loaded = hf.prepared(prepare)

    # job.yaml
    preload: ["mypkg.data:prepare"]

The template calls the function after its imports and before it forks workers. Each worker has the returned value as a copy on
write: unchanged memory exists once per node, and a restart does not wait for the function. `prepared` returns this value. In a
process without such a template (plain python, torchrun, a function that was left out), `prepared` calls the function.

A prepare function takes no arguments. It sees the job's `env`, and neither a rank nor the script's arguments: one call serves
all workers of a node, and later starts. The state of the random number generators is restored after the call, so that a script
draws the same numbers whichever process called the function."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import select
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar, cast

import torch

from holdfast.domain.errors import InvalidSpec

Value = TypeVar("Value")

TIMEOUT_S: Final = 600.0

_values: dict[str, Any] = {}  # by module:function; forked workers inherit it


class PrepareFailed(Exception):
    """A prepare function that does not exist, or that raised an exception. The message names it."""


def prepared(function: Callable[[], Value]) -> Value:
    """Return what `function` returned in the worker template, or call it in this process; once, later calls return the same.

    Raises `InvalidSpec` for a function that the template cannot import: one of the script itself, a method, a lambda, or one
    inside of another function."""
    name = _name_of(function)
    if name not in _values:
        _values[name] = _called(function)
    return cast(Value, _values[name])


def is_function(name: str) -> bool:
    """Whether an entry of `preload` is a prepare function, `module:function`, rather than a module."""
    return ":" in name


def module_of(name: str) -> str:
    return name.partition(":")[0]


def call(name: str, on_timeout: Callable[[str], None], timeout_s: float = TIMEOUT_S) -> None:
    """Import `module:function` in the template, call it, and keep the returned value. torch uses one thread, because a
    process with two threads cannot be forked safely.

    Raises `PrepareFailed`. A function that takes longer than `timeout_s` ends this process: a watching child calls `on_timeout`
    with the reason and kills it, because code in C cannot be interrupted."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except Exception as error:
        raise PrepareFailed(f"importing {module} for {name} failed: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise PrepareFailed(f"{module} has no function {attribute}, which preload names as {name}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        defined = _name_of(function)  # another module may have imported it
        with _time_limit(name, on_timeout, timeout_s):
            _values[defined] = _called(function)
    except (Exception, SystemExit) as error:
        raise PrepareFailed(f"{name} failed: {type(error).__name__}: {error}") from error
    finally:
        torch.set_num_threads(threads)


def _called(function: Callable[[], Value]) -> Value:
    with _random_states_kept():
        return function()


def _name_of(function: Callable[[], Any]) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if not module or module == "__main__" or not name.isidentifier():
        found = f"{name or repr(function)} of {'the script itself' if module == '__main__' else module}"
        raise InvalidSpec("function", found, "a function of a module, which the worker template can import")
    return f"{module}:{name}"


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restore the state of the host's random number generators at the end. Devices are excluded: reading their state would open
    them."""
    python, on_host = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(on_host)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


@contextlib.contextmanager
def _time_limit(name: str, on_timeout: Callable[[str], None], timeout_s: float) -> Iterator[None]:
    """Kill this process if the block takes longer. The watcher is a process, since the template must have one thread."""
    ours, theirs = os.pipe()
    parent = os.getpid()
    watcher = os.fork()
    if watcher == 0:
        try:
            os.close(theirs)
            _watch(ours, parent, name, on_timeout, timeout_s)
        finally:
            os._exit(0)
    os.close(ours)
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):  # the watcher has been killed
            os.write(theirs, b".")  # a process that the function has forked keeps the pipe open
        os.close(theirs)
        with contextlib.suppress(ChildProcessError):  # reaped by the function, or by the kernel
            os.waitpid(watcher, 0)


def _watch(pipe: int, parent: int, name: str, on_timeout: Callable[[str], None], timeout_s: float) -> None:
    """Return when `pipe` is written to or closed, which the end of the parent does as well."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN | select.POLLHUP)
    if not poll.poll(1000 * timeout_s) and os.getppid() == parent:
        on_timeout(f"{name} takes longer than {timeout_s:g} s")
        os.kill(parent, signal.SIGKILL)
