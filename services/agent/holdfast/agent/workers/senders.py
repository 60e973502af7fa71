"""Identifies the sender of a datagram: the kernel reports its pid (SCM_CREDENTIALS), which must be a worker or its descendant.

A worker that runs as another user cannot send under the pid of another process. So a note that names a rank is accepted only
from that rank's process and from processes that it has started."""

from __future__ import annotations

import socket
import struct
from collections import OrderedDict
from collections.abc import Sequence

from holdfast.agent.workers.procfs import parent_of, started_at

CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
ANCESTORS_MAX = 32  # generations between a process of the script and its worker
REMEMBERED_MAX = 1024  # processes that workers have started


def ask_for_credentials(receiver: socket.socket) -> None:
    """From now on each datagram comes with the credentials of its sender."""
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def sender_of(ancillary: Sequence[tuple[int, int, bytes]]) -> int:
    """Return the pid that the kernel has attached to a datagram; 0 if the sender is not visible here."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) >= CREDENTIALS.size:
            pid: int = CREDENTIALS.unpack_from(data)[0]
            return pid
    return 0


class Senders:
    """Remembers the processes that workers have started, so that their last notes count after their end."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[int, int]] = OrderedDict()  # pid → worker, start of the process

    def belongs(self, pid: int, worker: int) -> bool:
        """Whether the process `pid` is the worker's or was started by it."""
        if pid == worker:
            return True
        if pid <= 0:
            return False
        since, known = started_at(pid), self._known.get(pid)
        if known is not None and since in (0, known[1]):  # it has ended, or is still the same process
            return known[0] == worker
        if since == 0 or not _is_below(pid, worker):
            return False
        self._known[pid] = (worker, since)
        while len(self._known) > REMEMBERED_MAX:
            self._known.popitem(last=False)
        return True


def _is_below(pid: int, worker: int) -> bool:
    for _ in range(ANCESTORS_MAX):
        pid = parent_of(pid)
        if pid <= 1:
            return False
        if pid == worker:
            return True
    return False
