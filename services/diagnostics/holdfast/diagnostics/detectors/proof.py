"""Decides whether a stall is proven or may end by itself. A pure function over the same evidence as the diagnosis.

A pause that the script did not announce (an evaluation, a save to a remote store, a slow batch) looks like a hang until the
pause ends. Only a stall that cannot end by itself is proven:

* a process is dead, or stopped by a POSIX signal (state T), and most processes are not;
* members of a group are in different collectives at the same place, or wait for each other in different groups;
* a rank is inside a collective that the other members have finished;
* the others wait in collectives for a rank that has ended, or for an idle rank that has not entered these collectives. An idle
  rank uses no CPU time and does not wait for a disk, a socket or a pipe, on which another process could wake it.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.diagnostics.detectors.localise import GONE, RankView
from holdfast.diagnostics.detectors.waiting import Standing, Waiting

_IDLE = 0.1  # share of one CPU
_WINDOW_MIN_S = 0.9  # between two reports of an agent
# Kernel functions (/proc/PID/wchan) in which a thread waits for an event from outside its process.
_OUTSIDE = (
    "do_poll", "poll_", "do_sys_poll", "ep_poll", "do_epoll", "do_select", "pipe_", "anon_pipe", "unix_", "sk_", "tcp_",
    "inet_", "udp_", "wait_woken", "skb_", "io_", "folio_", "wait_on_page", "wait_on_buffer", "blkdev", "nfs", "rpc_", "fuse_",
    "request_wait_answer", "ceph", "lustre", "cl_", "gpfs", "do_wait",
)  # fmt: skip
_FINAL = (Standing.MISMATCH, Standing.CYCLE, Standing.STALLED)


def signalled(ranks: Sequence[RankView]) -> bool:
    """Whether some processes are dead or stopped, but at most half: an operator may have suspended the whole job."""
    found = sum(view.state in GONE or view.state == "T" for view in ranks)
    return 0 < found * 2 <= len(ranks)


def never_ends(ranks: Sequence[RankView], waiting: Waiting | None, ended: frozenset[int]) -> bool:
    """Whether the stall that the flight recorders show cannot end by itself."""
    if waiting is None:
        return False
    if waiting.standing in _FINAL:
        return True
    if waiting.standing is Standing.UNREACHABLE:
        return bool(waiting.ranks) and waiting.ranks[0] in ended
    if waiting.standing is not Standing.ABSENT:
        return False
    named = {view.rank: view for view in ranks if view.rank in waiting.ranks}
    return bool(named) and all(map(_does_nothing, named.values()))


def _does_nothing(view: RankView) -> bool:
    if view.state != "S" or view.window_s < _WINDOW_MIN_S or view.cpu > _IDLE:
        return False
    return not view.kernel.startswith(_OUTSIDE)
