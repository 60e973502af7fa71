"""Waits at the end of a process until its gloo threads are idle.

Theory. A thread of a gloo group releases the result of a collective shortly after the collective has returned. If the result
contains a Python tensor, the release needs the interpreter's lock, and a thread that requests the lock while the interpreter
shuts down ends the process: "terminate called without an active exception", SIGABRT (torch 2.13; PyTorch issue 190489).
Destroying the group does not help if another object holds it, such as DistributedDataParallel or a cached DeviceMesh.

The process therefore waits, without the lock, until these threads have no work left. While the lock is free, a sleeping thread
waits for the next collective, and a runnable thread is about to release a result."""

from __future__ import annotations

import os
import time

THREAD = "pt_gloo_runloop"
LOOK_S = 0.02  # between two checks, without the interpreter's lock
WAIT_S_MAX = 2.0


def wait_until_idle() -> bool:
    """Wait until no gloo thread of this process is runnable, for at most `WAIT_S_MAX`. Returns False on timeout."""
    if not states():
        return True
    ends, idle = time.monotonic() + WAIT_S_MAX, 0
    while time.monotonic() < ends:
        time.sleep(LOOK_S)
        idle = idle + 1 if all(state == "S" for state in states()) else 0
        if idle == 2:  # this thread may have held the lock during one check
            return True
    return False


def states() -> list[str]:
    """Return the scheduler's state of each gloo thread: "S" sleeping, "R" runnable (proc(5))."""
    found = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/stat") as stat:
                _, _, rest = stat.read().partition("(")
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            continue
        name, _, fields = rest.rpartition(")")
        if name == THREAD:
            found.append(fields.split()[0])
    return found
