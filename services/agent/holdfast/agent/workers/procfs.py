"""What the kernel says of a process, from /proc/PID/stat (proc_pid_stat(5))."""

from __future__ import annotations

import os

from holdfast.agent.workers.progress import ProcessFacts

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Fields after the command's closing parenthesis, which may itself hold spaces and parentheses: state is the first.
_STATE, _UTIME, _STIME = 0, 11, 12


def process_facts(pid: int) -> ProcessFacts:
    """State and CPU time; `state` is "" when there is no such process any more."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            fields = stat.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ProcessFacts()
    cpu_ticks = int(fields[_UTIME]) + int(fields[_STIME])
    return ProcessFacts(fields[_STATE].decode("ascii"), cpu_ticks / _TICKS_PER_S)
