"""What `ps` and `nvidia-smi` show for a worker: `holdfast: JOB rank 3`.

The command line that the kernel shows is memory of the process, and a forked worker has that of its template. The title is
written over it. It does not reach into the environment behind it, as setproctitle(3) would: agents know the processes of an
earlier agent by their environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_ARG_START: Final = 48  # fields of /proc/PID/stat, numbered from 1 as in proc(5)
_ARG_END: Final = 49
_AFTER_NAME: Final = 3  # the first field behind the process's name, which may contain spaces


def set_title(job: str, rank: str) -> None:
    """Where there is too little room, the job's name is cut; where the kernel does not allow it, nothing is changed."""
    try:
        stat = Path("/proc/self/stat").read_text()
        fields = stat[stat.rindex(")") + 1 :].split()
        start, end = (int(fields[number - _AFTER_NAME]) for number in (_ARG_START, _ARG_END))
        room = end - start - 1  # the last byte stays zero: otherwise the kernel reads on into the environment
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
