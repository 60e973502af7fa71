"""State of a process, from /proc/PID/stat and /proc/PID/wchan (proc(5))."""

from __future__ import annotations

import os

from holdfast.agent.workers.progress import ProcessFacts

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields after the command's closing parenthesis, which may itself hold spaces and parentheses: state is the first.
_STATE, _PPID, _UTIME, _STIME = 0, 1, 11, 12


def process_facts(pid: int) -> ProcessFacts:
    """State and CPU time; `state` is "" when there is no such process any more, "?" when that cannot be known."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ProcessFacts()
    except OSError:  # no free file descriptor: unknown is not gone
        return ProcessFacts("?")
    cpu_ticks = int(fields[_UTIME]) + int(fields[_STIME])
    return ProcessFacts(fields[_STATE].decode("ascii"), cpu_ticks / _TICKS_PER_S)


def parent_of(pid: int) -> int:
    """Its parent's pid; 0 when there is no such process any more, or that cannot be known."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[_PPID])
    except OSError:
        return 0


def kernel_wait(pid: int) -> str:
    """The kernel function in which its main thread waits; "" while it runs, is gone, or the kernel does not say."""
    try:
        with open(f"/proc/{pid}/wchan", "rb") as wchan:
            name = wchan.read().decode("ascii", errors="replace")
    except OSError:
        return ""
    return "" if name == "0" else name
