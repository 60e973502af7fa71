"""Tries modules in a fork of the worker template before the template itself imports them.

A thread of a module cannot be removed again, and a template with two threads cannot fork workers. So a *scout*, a fork of the
template, imports one module after the other and reports each result; it ends at the first module that must not be imported.
The template then imports the modules before that one, omits it, and starts another scout for the rest. Each imported module
thus costs two imports, an omitted module one. The template repeats the scout's checks after its own imports.

Modules that start a thread, open a device, fail, end or kill the process, or take longer than `MODULE_TIMEOUT_S` must not be
imported. The same applies to modules that the job does not name and that read the identity of a worker (`RANK` and similar
variables) when they are imported: all workers would have the same identity."""

from __future__ import annotations

import importlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

MODULE_TIMEOUT_S: Final = 120.0
REASON_CHARS_MAX: Final = 300
IMPORT_FAILS: Final = "its import fails: "
# Variables that differ between the workers of a node, or between two generations.
IDENTITY: Final = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
    }
)

Check = Callable[[str], str]  # module → the problem that its import has caused; empty = none


def import_all(names: Iterable[str], check: Check, *, asked_for: frozenset[str] = frozenset()) -> dict[str, str]:
    """Import the modules that can be imported, in this order. Returns the others, each with the reason. `check` is called after
    each import, in the scout and here. Raises RuntimeError if `check` finds a problem here."""
    left_out: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        passed, reason = _send_scout(waiting, check, asked_for)
        for name in waiting[:passed]:
            importlib.import_module(name)
            if found := check(name):
                raise RuntimeError(found)
        if passed < len(waiting):
            left_out[waiting[passed]] = reason
        waiting = waiting[passed + 1 :]
    return left_out


def _send_scout(names: Sequence[str], check: Check, asked_for: frozenset[str]) -> tuple[int, str]:
    """Return how many of the modules passed, and the problem of the next one."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        code = 1
        try:
            _scout(names, check, asked_for, theirs)
            code = 0
        finally:
            os._exit(code)
    os.close(theirs)
    try:
        passed, reason = _read_results(ours, len(names))
    finally:
        os.close(ours)
        _end(pid)
    return passed, reason


def _read_results(pipe: int, count: int) -> tuple[int, str]:
    """Read one line per module: empty if the module passed, otherwise the reason."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN | select.POLLHUP)
    passed, rest, deadline = 0, b"", time.monotonic() + MODULE_TIMEOUT_S
    while passed < count:
        line, newline, after = rest.partition(b"\n")
        if newline:
            if line:
                return passed, line.decode(errors="replace")
            passed, rest, deadline = passed + 1, after, time.monotonic() + MODULE_TIMEOUT_S
            continue
        if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            return passed, f"its import takes longer than {MODULE_TIMEOUT_S:g} s"
        more = os.read(pipe, 65536)
        if not more:
            return passed, "its import ends the process"
        rest += more
    return passed, ""


def _end(pid: int) -> None:
    """Kill the scout, if it has not ended, and reap it. If this process ignores SIGCHLD, the kernel has reaped it."""
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _scout(names: Sequence[str], check: Check, asked_for: frozenset[str], pipe: int) -> None:
    for name in names:
        read: set[str] = set()
        try:
            with _environment_watched(read):
                importlib.import_module(name)
            reason = check(name)
        except BaseException as error:
            reason = f"{IMPORT_FAILS}{type(error).__name__}: {error}"
        if not reason and name not in asked_for and (identity := sorted(IDENTITY & read)):
            reason = f"it reads {', '.join(identity)} when it is imported"
        line = " ".join(reason.split())[:REASON_CHARS_MAX]
        os.write(pipe, line.encode(errors="replace") + b"\n")
        if line:
            return


class _environment_watched:  # noqa: N801
    """Adds the names of the variables that are read from `os.environ` to `read`."""

    def __init__(self, read: set[str]) -> None:
        self._read = read

    def __enter__(self) -> None:
        self._original = original = os._Environ.__getitem__
        read = self._read

        def watched(environ: os._Environ[str], name: str) -> str:
            if isinstance(name, str):
                read.add(name)
            return original(environ, name)

        os._Environ.__getitem__ = watched  # type: ignore[method-assign, assignment]

    def __exit__(self, *error: object) -> None:
        os._Environ.__getitem__ = self._original  # type: ignore[method-assign]
