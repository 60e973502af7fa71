"""State of a process, from /proc/PID/stat and /proc/PID/wchan (proc(5))."""

from __future__ import annotations

import os

from holdfast.agent.workers.progress import ProcessFacts

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Indices of fields after the command's closing parenthesis. The command itself may contain spaces and parentheses.
_STATE, _PPID, _UTIME, _STIME, _STARTTIME = 0, 1, 11, 12, 19


def process_facts(pid: int) -> ProcessFacts:
    """Return state and CPU time. `state` is "" if the process no longer exists, and "?" if it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ProcessFacts()
    except OSError:  # for example, no free file descriptor; the process may exist
        return ProcessFacts("?")
    cpu_ticks = int(fields[_UTIME]) + int(fields[_STIME])
    return ProcessFacts(fields[_STATE].decode("ascii"), cpu_ticks / _TICKS_PER_S)


def parent_of(pid: int) -> int:
    """Return the pid of the process's parent; 0 if the process no longer exists or cannot be read."""
    return _number(pid, _PPID)


def started_at(pid: int) -> int:
    """Return when the process was started, in ticks since the boot; 0 if it no longer exists or cannot be read. The
    value distinguishes processes that had the same pid."""
    return _number(pid, _STARTTIME)


def _number(pid: int, field: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[field])
    except OSError:
        return 0


def kernel_wait(pid: int) -> str:
    """Return the kernel function in which the main thread waits; "" if it runs, has ended, or the kernel hides it."""
    try:
        with open(f"/proc/{pid}/wchan", "rb") as wchan:
            name = wchan.read().decode("ascii", errors="replace")
    except OSError:
        return ""
    return "" if name == "0" else name
