"""Tries modules in a fork of the worker template before the template itself imports them.

A thread cannot be taken back, and a template with two can fork no worker. So a *scout*, a fork of the template, imports one
module after the other and says after each how it went; it ends at the first that is not to be imported. The template then
imports those before it, leaves that one out, and sends another scout from there. So each module costs two imports, and one
that is left out only its own. What a scout finds, the template checks again for itself.

Not to be imported are modules that start a thread, open a device, fail, end or kill the process, or take longer than
`MODULE_TIMEOUT_S`; and, of those that nobody asked for, modules that read who they are (`RANK` and alike) when they are
imported: all workers would be the same one."""

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
# Differ between the workers of a node, or between two generations.
IDENTITY: Final = frozenset(
    {
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"),
    }
)

Check = Callable[[str], str]  # what is wrong after the import of this module; empty = nothing


def import_all(names: Iterable[str], check: Check, *, asked_for: frozenset[str] = frozenset()) -> dict[str, str]:
    """Import the modules that may be, in this order. Returns the others with the reason. `check` is called after each import,
    in the scout and here; here it must find nothing."""
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
    """Return how many of the modules passed, and what is wrong with the next one."""
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
        passed, reason = _listen(ours, len(names))
    finally:
        os.close(ours)
        _end(pid)
    return passed, reason


def _listen(pipe: int, count: int) -> tuple[int, str]:
    """A line per module: empty when it passed, otherwise the reason."""
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
    """Kill the scout, if it has not ended. It is reaped by whoever ignores SIGCHLD, or here."""
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
    """Adds the names of the variables that are looked up in `os.environ` to `read`."""

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
