"""Sets the title that `ps` and `nvidia-smi` show for a worker: `holdfast: JOB rank 3`.

The kernel reads a process's command line from the process's memory, and a forked worker has the command line of its template.
The title overwrites it. Unlike setproctitle(3), it does not extend into the environment that follows in memory, because agents
recognise the processes of an earlier agent by their environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_ARG_START: Final = 48  # fields of /proc/PID/stat, numbered from 1 as in proc(5)
_ARG_END: Final = 49
_AFTER_NAME: Final = 3  # the first field behind the process's name, which may contain spaces


def set_title(job: str, rank: str) -> None:
    """Set the title. The job's name is truncated if it does not fit. Does nothing if the kernel does not allow the change."""
    try:
        stat = Path("/proc/self/stat").read_text()
        fields = stat[stat.rindex(")") + 1 :].split()
        start, end = (int(fields[number - _AFTER_NAME]) for number in (_ARG_START, _ARG_END))
        room = end - start - 1  # the last byte stays zero; otherwise the kernel also reads the environment
        name = job[: max(0, room - len(_titled("", rank)))]
        title = _titled(name, rank).encode(errors="replace")[:room]
        if not 0 < start < end:
            return
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            memory.write(title.ljust(end - start, b"\0"))
    except (OSError, ValueError, IndexError):
        return


def _titled(job: str, rank: str) -> str:
    return f"holdfast: {job} rank {rank}"
