"""Runs the agent on each node of an allocation: starts it again if it crashes, and notifies it when the allocation ends.

Which processes get Slurm's SIGTERM (`scancel`, preemption) depends on its process tracking:

| ProctrackType | receivers of SIGTERM | result |
|---|---|---|
| cgroup, pgid | this process; the agent has a separate process group | the agent is notified, once: the job is saved |
| linuxproc | every process of the step, workers included | the workers end; the job continues from its last checkpoint |

The notification is SIGUSR1, because a second SIGTERM would end the agent at once, and with linuxproc it has already got one.

When the job is over, agents that are still there (they wait in case other nodes restore from here) get SIGTERM, which is the
first signal or the second, and end at once.

When an agent has left in good order, its memory tier is deleted, because the machine's next user needs the memory, and the save
is on disk and in the store. After any other end, it is retained for the next agent of this node.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from holdfast.cli.slurm import ending
from holdfast.cli.tending import Restarts
from holdfast.runtime.processes.children import tied

USAGE = 2  # exit code of a service: a wrong setting, or a missing resource such as a port or a file system
USAGE_MAX = 3  # such exits in a row: a wrong setting would fail again, a missing resource may appear
POLL_S = 0.2
LOOK_S = 5.0  # between two reads of the shared directory


class NodeTask:
    """Runs in the main thread of a separate process. `grace_s`: time from the agent's notification to its end."""

    def __init__(self, command: Sequence[str], memory: Path, shared: Path, slurm_job: str, grace_s: float) -> None:
        self._command, self._memory = command, memory
        self._shared, self._slurm_job, self._grace_s = shared, slurm_job, grace_s
        self._read_at = -LOOK_S
        self._ends_at: float | None = None
        self._leaving = False
        self._over = False

    def run(self) -> int:
        """Return the exit code of the last agent."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._on_signal)
        restarts = Restarts(time.monotonic())
        refusals = 0
        while True:
            code = self._one_agent()
            refusals = refusals + 1 if code == USAGE else 0
            if self._leaving or code == 0 or refusals == USAGE_MAX:
                break
            pause_s = restarts.ended(time.monotonic())
            sys.stderr.write(f"the agent ended with {code}; starting it again in {pause_s:g} s\n")
            sys.stderr.flush()
            if self._leaves_within(pause_s):
                break
            restarts.started(time.monotonic())
        if self._leaving and code == 0:
            shutil.rmtree(self._memory, ignore_errors=True)
        return code

    def _one_agent(self) -> int:
        agent = subprocess.Popen(tied(self._command), stdin=subprocess.DEVNULL, process_group=0)
        notified = stopped = False
        while (code := agent.poll()) is None:
            time.sleep(POLL_S)
            self._leaving = self._is_ending() or self._leaving
            if self._over and not stopped:
                notified = stopped = True
                os.kill(agent.pid, signal.SIGTERM)
            elif self._leaving and not notified:
                notified = True
                os.kill(agent.pid, signal.SIGUSR1)
        return code

    def _is_ending(self) -> bool:
        if (now := time.monotonic()) - self._read_at >= LOOK_S:
            self._read_at = now
            found = ending.read(self._shared, self._slurm_job)
            self._ends_at = None if found is None else found.ends_at
            self._over = self._over or (found is not None and found.over)
        return self._ends_at is not None and time.time() >= self._ends_at - self._grace_s

    def _on_signal(self, *_: int | FrameType | None) -> None:
        self._leaving = True

    def _leaves_within(self, pause_s: float) -> bool:
        until = time.monotonic() + pause_s
        while not self._leaving and time.monotonic() < until:
            time.sleep(POLL_S)
        return self._leaving
