"""A worker and its reaper as the template reports them, and the checks of such a report.

Code of the job runs in the template. If the template runs as another user, a forged report must not make the agent, which has
more rights, signal or wait for a process that is not a worker of this user. One check is enough: a pidfd refers to the same
process permanently, and a process of this user cannot change to another user."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import anyio


@dataclass(slots=True)
class Forked:
    """A worker, its reaper, and the reaper's link; all three descriptors are the receiver's to close."""

    pid: int
    pidfd: int
    reaper: int  # its pidfd
    link: socket.socket


async def refuse_foreign(forked: Forked, uid: int) -> str:
    """Return why the report is refused; "" if it is true. The descriptors of a refused report are closed, and its reaper is
    ended if it is one."""
    reaper = pid_of(forked.reaper)
    parent, owner = _parent_and_owner(reaper)
    if parent != os.getpid() or owner != uid:
        why = f"it reports a process as a reaper that is not a child of this agent and of user {uid}"
        _close(forked.pidfd, forked.reaper)
        return why
    worker = pid_of(forked.pidfd)
    if worker > 0 and worker == forked.pid and _parent_and_owner(worker) == (reaper, uid):
        return ""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(forked.reaper, signal.SIGKILL)  # its worker is killed with it
    await anyio.wait_readable(forked.reaper)  # it has ended
    _reap(forked.reaper)
    _close(forked.pidfd, forked.reaper)
    return f"it reports pid {forked.pid}, which is not a worker of user {uid} that is alive"


def pid_of(pidfd: int) -> int:
    """Return the pid of the process that a pidfd refers to; -1 if it has ended, 0 if the descriptor is not a pidfd."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Pid":
            return int(value)
    return 0


def _parent_and_owner(pid: int) -> tuple[int, int]:
    """Return the pid of the parent, and the uid if the process has only one; -1 for unknown values."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines() if pid > 0 else []
    except OSError:  # it has ended
        return -1, -1
    fields = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    uids = set(fields.get("Uid", ()))
    return int(fields.get("PPid", ["-1"])[0]), int(uids.pop()) if len(uids) == 1 else -1


def _reap(pidfd: int) -> None:
    with suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)


def _close(*descriptors: int) -> None:
    for fd in descriptors:
        os.close(fd)
