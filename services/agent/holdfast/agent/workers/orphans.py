"""Finds and kills processes that a worker has left because its reaper was killed.

The agent is a child subreaper, so reapers become its children, and so do the processes of a killed reaper. After a reaper was
killed, a process is an orphan if it is a child of the agent, has another session than the agent, and is not a reaper.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import anyio
import structlog

from holdfast.domain.errors import HoldfastError

log = structlog.get_logger("holdfast.agent.workers")

PR_SET_CHILD_SUBREAPER = 36
REAPER = "holdfast-reaper"  # as `holdfast.train.warm.reaper` names itself
ROUNDS_MAX = 100  # the children of killed processes are found in the next round
ROUND_S = 0.02


def become_subreaper() -> None:
    """Raises `HoldfastError` if the kernel does not support it (before Linux 3.4)."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise HoldfastError(f"prctl(PR_SET_CHILD_SUBREAPER) failed: {os.strerror(ctypes.get_errno())}")


async def end_orphans() -> None:
    """Kill and reap all orphans, and the children that they leave."""
    for _ in range(ROUNDS_MAX):
        orphans = list(_orphans())
        if not orphans:
            return
        for pid in orphans:
            _end(pid)
        await anyio.sleep(ROUND_S)


def _end(pid: int) -> None:
    log.warning("orphaned process killed", pid=pid)
    try:
        os.kill(pid, signal.SIGKILL)  # a child of this process, so the pid is not reused before it is reaped here
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
    except (PermissionError, ChildProcessError):
        pass  # a set-user-ID program, which the kernel does not allow to be killed, or a process that was reaped already


def _orphans() -> Iterator[int]:
    me, session = os.getpid(), os.getsid(0)
    for entry in os.scandir("/proc"):
        if not entry.name.isdecimal():
            continue
        try:
            name, _, rest = Path(entry.path, "stat").read_text(errors="replace").rpartition(")")
        except OSError:
            continue  # the process has ended
        _, parent, _, its_session = rest.split()[:4]
        if int(parent) == me and int(its_session) != session and name.partition("(")[2] != REAPER:
            yield int(entry.name)
