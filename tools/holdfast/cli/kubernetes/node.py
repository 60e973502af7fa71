"""Runs the agent in a node's pod: starts it again if it crashes, and signals it when the pod is deleted.

The pod never succeeds. An Indexed Job counts every pod that ended with 0 as done, even if it was evicted, and would not replace
it. Therefore an agent that has left in good order ends its pod with `SUSPENDED`.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType

from holdfast.cli.endings import SUSPENDED, USAGE_ERROR
from holdfast.cli.tending import Restarts
from holdfast.runtime.processes.children import tied

POLL_S = 0.1


class NodePod:
    """Runs in the main thread of a separate process."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._agent: subprocess.Popen[bytes] | None = None
        self._leaving = False

    def run(self) -> int:
        """Return the exit code of the container, which is never 0."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._on_signal)
        restarts = Restarts(time.monotonic())
        while not self._leaving:
            code = self._one_agent()
            if self._leaving or code == USAGE_ERROR:  # another start with the same wrong setting would fail again
                return code if code > 0 else SUSPENDED
            pause_s = restarts.ended(time.monotonic())
            sys.stderr.write(f"the agent ended with {code}; starting it again in {pause_s:g} s\n")
            sys.stderr.flush()
            self._pause(pause_s)
            restarts.started(time.monotonic())
        return SUSPENDED

    def _one_agent(self) -> int:
        self._agent = subprocess.Popen(tied(self._command), stdin=subprocess.DEVNULL)
        if self._leaving:  # a signal has arrived before the agent was started
            self._agent.terminate()
        return self._agent.wait()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._leaving = True
        if self._agent is not None and self._agent.returncode is None:
            self._agent.send_signal(number)

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._leaving and time.monotonic() < until:
            time.sleep(POLL_S)
