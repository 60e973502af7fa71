"""What a pod of a node runs: the agent, started again if it crashes, and told when the pod is deleted.

The pod never succeeds. An Indexed Job counts a pod that ended with 0 as done, also one that was evicted, and would not replace
it: so an agent that has left in good order ends its pod with `SUSPENDED`.
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
from holdfast.runtime.children import tied

POLL_S = 0.1


class NodePod:
    """Runs in the main thread of a process of its own."""

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
            if self._leaving or code == USAGE_ERROR:  # a setting that is wrong will be wrong again
                return code if code > 0 else SUSPENDED
            pause_s = restarts.ended(time.monotonic())
            sys.stderr.write(f"the agent ended with {code}; starting it again in {pause_s:g} s\n")
            sys.stderr.flush()
            self._pause(pause_s)
            restarts.started(time.monotonic())
        return SUSPENDED

    def _one_agent(self) -> int:
        self._agent = subprocess.Popen(tied(self._command), stdin=subprocess.DEVNULL)
        if self._leaving:  # a signal that came before there was an agent to pass it on to
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
