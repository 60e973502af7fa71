"""Tries modules in a fork of the worker template before the template itself imports them.

A thread of a module cannot be removed again, and a template with two threads cannot fork workers. So a *scout*, a fork of the
template, imports one module after the other and reports each result; it ends at the first module that must not be imported.
The template then imports the modules before that one, omits it, and starts another scout for the rest. Each imported module
thus costs two imports, an omitted module one. The template repeats the scout's checks after its own imports.

Modules that start a thread, open a device, fail, end or kill the process, take too long, or more memory than the scout
may have must not be imported. The same applies to modules that the job does not name and whose import has one of the
`side_effects`. A scout has a low priority, and is what the kernel ends first if memory runs out."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from holdfast.train.warm.side_effects import SideEffects, children

MODULE_TIMEOUT_S: Final = 120.0
LEARNED_TIMEOUT_S: Final = 600.0  # of modules that nothing waits for: the ranks may need the processors
CPU_S_MAX: Final = 120.0  # of all scouts; the learned modules that remain then are not imported
REASON_CHARS_MAX: Final = 300
IMPORT_FAILS: Final = "its import fails: "
MEMORY_BYTES_MAX: Final = 4 << 30  # that all modules together may allocate, in addition to what every template has …
MEMORY_SHARE_MAX: Final = 0.25  # … and this share of the memory that is available
NICE: Final = 5
CAP_SYS_NICE: Final = 23

Check = Callable[[str], str]  # module → the problem that its import has caused; empty = none


def import_all(
    names: Iterable[str],
    check: Check,
    *,
    asked_for: frozenset[str] = frozenset(),
    variables: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Import the modules that can be imported, in this order. Returns the others, each with the reason. `check` is called after
    each import, in the scout and here. Raises RuntimeError if `check` finds a problem here. `variables`: those that modules not
    in `asked_for` must not read (`SideEffects`)."""
    left_out: dict[str, str] = {}
    waiting = list(names)
    began_s, data_bytes_max = _cpu_of_children_s(), _data_bytes_max()
    while waiting and (_cpu_of_children_s() - began_s < CPU_S_MAX or not asked_for.isdisjoint(waiting)):
        passed, reason = _send_scout(waiting, check, asked_for, variables or {}, data_bytes_max)
        with _low_priority(asked_for.isdisjoint(waiting)):
            for name in waiting[:passed]:
                importlib.import_module(name)
                if found := check(name):
                    raise RuntimeError(found)
        if passed < len(waiting):
            left_out[waiting[passed]] = reason
        below = f"{waiting[passed]}." if passed < len(waiting) else ""
        # The import of a submodule begins with that of its package.
        waiting = [
            name for name in waiting[passed + 1 :] if name in asked_for or not (below and name.startswith(below))
        ]
    return left_out


def _cpu_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _data_bytes_max() -> int:
    """Return the limit of a scout's memory: what this process has now, and what modules may allocate."""
    with open("/proc/self/status") as file:
        has = next((int(line.split()[1]) << 10 for line in file if line.startswith("VmData:")), 0)
    with open("/proc/meminfo") as file:
        available = next((int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable:")), 0)
    return has + min(MEMORY_BYTES_MAX, int(MEMORY_SHARE_MAX * available))


def _send_scout(
    names: Sequence[str], check: Check, asked_for: frozenset[str], variables: Mapping[str, str], data_bytes_max: int
) -> tuple[int, str]:
    """Return how many of the modules passed, and the problem of the next one."""
    modest = asked_for.isdisjoint(names)
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        code = 1
        try:
            if modest:
                _be_modest(data_bytes_max)
            _scout(names, check, asked_for, variables, theirs)
            code = 0
        finally:
            for child in children():  # that an import has left running
                _end(child)
            os._exit(code)
    os.close(theirs)
    try:
        passed, reason = _read_results(ours, len(names), LEARNED_TIMEOUT_S if modest else MODULE_TIMEOUT_S)
    finally:
        os.close(ours)
        _end(pid)
    return passed, reason


@contextlib.contextmanager
def _low_priority(wanted: bool) -> Iterator[None]:
    """Have a low priority in the block, where this process may raise it again afterwards: its workers inherit it."""
    with open("/proc/self/status") as file:
        capabilities = next((int(line.split()[1], 16) for line in file if line.startswith("CapEff:")), 0)
    before = os.getpriority(os.PRIO_PROCESS, 0)
    lowers = wanted and bool(capabilities >> CAP_SYS_NICE & 1)
    try:
        if lowers:
            os.setpriority(os.PRIO_PROCESS, 0, before + NICE)
        yield
    finally:
        if lowers:
            os.setpriority(os.PRIO_PROCESS, 0, before)


def _be_modest(data_bytes_max: int) -> None:
    """Nothing waits for learned modules: leave the processor and the memory to the ranks."""
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_DATA, (data_bytes_max, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _read_results(pipe: int, count: int, timeout_s: float) -> tuple[int, str]:
    """Read one line per module: empty if the module passed, otherwise the reason."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN | select.POLLHUP)
    passed, rest, deadline = 0, b"", time.monotonic() + timeout_s
    while passed < count:
        line, newline, after = rest.partition(b"\n")
        if newline:
            if line:
                return passed, line.decode(errors="replace")
            passed, rest, deadline = passed + 1, after, time.monotonic() + timeout_s
            continue
        if not poll.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
            return passed, f"its import takes longer than {timeout_s:g} s"
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


def _scout(
    names: Sequence[str], check: Check, asked_for: frozenset[str], variables: Mapping[str, str], pipe: int
) -> None:
    effects = SideEffects(variables)
    for name in names:
        try:
            done = effects.of(partial(importlib.import_module, name)) if name not in sys.modules else ""
            reason = check(name) or (done if name not in asked_for else "")
        except BaseException as error:
            reason = f"{IMPORT_FAILS}{type(error).__name__}: {error}"
        line = " ".join(reason.split())[:REASON_CHARS_MAX]
        os.write(pipe, line.encode(errors="replace") + b"\n")
        if line:
            return
