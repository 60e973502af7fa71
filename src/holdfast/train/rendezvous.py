"""The beginning and the end of the store in which the ranks of a group find each other. A thread of rank 0 serves it.

*Beginning.* torch's own client sleeps for half a second after a refused connection (measured with 2.13), which is as long as
the rest of a recovery. The other ranks therefore poll the port every 3 ms, and connect when it is open.

*End.* The store ends with rank 0's process. A rank that is still forming the group then fails, and `init_process_group` of rank
0 may return before that of the others (gloo connects each pair of ranks by itself). A script that ends after a few
milliseconds without a collective could so fail in some ranks. Each rank therefore counts itself once it has formed the group,
and rank 0 leaves when all are counted. With gloo, where a rank could leave before another one has connected to it, the other
ranks wait for the count at once: gloo has waited for all of them anyway.

*Earlier versions.* While the nodes of a job are upgraded, some of its ranks may be of an earlier version, which does not count
itself. A rank therefore also counts itself before it forms the group. Once gloo has connected a rank to all others, this second
count is final. If it lacks ranks, nobody waits for the first one."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Final

from torch.distributed import DistNetworkError, Store  # type: ignore[attr-defined]  # re-exported without `__all__`

POLL_S: Final = 0.003
CONNECT_TIMEOUT_S: Final = 5.0
# rank 0 waits no longer for a rank that ended without forming its group, or does not count itself
LEAVE_S_MAX: Final = 60.0
_FORMING: Final = "holdfast/forming"  # how many ranks form the group and will count themselves
_FORMED: Final = "holdfast/formed"  # how many ranks have formed the group
_BY_ALL: Final = "holdfast/formed_by_all"


def wait_until_served(host: str, port: int, timeout_s: float) -> None:
    """Wait until the port accepts connections or the deadline has passed. torch's store then reports the endpoint in
    its error."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), timeout=min(CONNECT_TIMEOUT_S, timeout_s)).close()
        except OSError:  # rank 0's agent has reserved the port, and rank 0 does not listen yet
            time.sleep(POLL_S)
        else:
            return


class Formation:
    """Which ranks have formed the group. Create it before this rank forms the group."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._world_size = world_size
        self._serves = rank == 0
        self._all_count = True  # as far as is known
        self._leave_by = 0.0
        store.add(_FORMING, 1)

    def done(self, *, connected: bool) -> None:
        """This rank has formed the group. `connected`: to all other ranks."""
        self._leave_by = time.monotonic() + LEAVE_S_MAX
        if connected:
            self._all_count = self._store.add(_FORMING, 0) == self._world_size
        if self._store.add(_FORMED, 1) == self._world_size:
            self._store.set(_BY_ALL, "")

    def wait(self, timeout_s: float) -> None:
        """Wait until all ranks have formed the group; in rank 0, which serves the others until then, do nothing.

        Raises `torch.distributed.DistStoreError` on timeout."""
        if self._serves or not self._all_count:
            return
        try:
            self._store.wait([_BY_ALL], timedelta(seconds=timeout_s))
        except DistNetworkError:  # rank 0 has left, so all ranks had formed it
            pass

    def wait_to_leave(self) -> None:
        """In rank 0, wait until all ranks have formed the group, for at most `LEAVE_S_MAX` after this rank has; in others, do
        nothing."""
        if not self._serves or not self._all_count:
            return
        while not self._store.check([_BY_ALL]) and time.monotonic() < self._leave_by:
            time.sleep(POLL_S)  # in Python, where a signal can end it
