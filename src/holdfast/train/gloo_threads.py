"""The end of a process whose gloo threads are alive.

Theory. A thread of a gloo group releases the result of a collective a moment after the collective has returned. If the tensor
in it belongs to Python, that needs the interpreter's lock, and a thread that asks for the lock while the interpreter shuts down
ends the process: "terminate called without an active exception", SIGABRT (torch 2.13; PyTorch issue 190489). Destroying the
group does not help where something else still holds it, as DistributedDataParallel and a cached DeviceMesh do.

So the process waits, without the lock, until these threads have nothing left to do. A thread that sleeps while nobody holds
the lock waits for the next collective; one that could run is about to release something."""

from __future__ import annotations

import os
import time

THREAD = "pt_gloo_runloop"
LOOK_S = 0.02  # between two looks, without the interpreter's lock
WAIT_S_MAX = 2.0


def wait_until_idle() -> bool:
    """Wait until no gloo thread of this process can run, at most `WAIT_S_MAX`. Returns whether that was reached."""
    if not states():
        return True
    ends, idle = time.monotonic() + WAIT_S_MAX, 0
    while time.monotonic() < ends:
        time.sleep(LOOK_S)
        idle = idle + 1 if all(state == "S" for state in states()) else 0
        if idle == 2:  # this thread may have had the lock at one look
            return True
    return False


def states() -> list[str]:
    """Return the scheduler's state of each gloo thread: "S" sleeps, "R" could run (proc(5))."""
    found = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/stat") as stat:
                _, _, rest = stat.read().partition("(")
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        name, _, fields = rest.rpartition(")")
        if name == THREAD:
            found.append(fields.split()[0])
    return found
