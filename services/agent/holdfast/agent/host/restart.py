"""Replaces the agent by a new one, for example after an update of its package, if no worker runs on the node.

    RestartAgent ──no workers──► answered ──► SIGTERM to itself ──► stopped in good order ──► `python -m holdfast.agent`

The process stays the same, so systemd, a container or a launcher that runs the agent sees no exit. The new agent is a new
incarnation; shards in memory and on disk stay.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import anyio
import structlog
from anyio.abc import TaskGroup

from holdfast.agent.gpus.gpu_reset import named_workers
from holdfast.agent.outcome import Outcome
from holdfast.domain.errors import Conflict
from holdfast.domain.nodes import RunningWorker
from holdfast.domain.orders import RestartAgent

log = structlog.get_logger("holdfast.agent.host.restart")

SAID_S = 1.0  # time for the answer to reach the supervisor


@dataclass(slots=True)
class Restart:
    """Whether the process starts a new agent when the present one has stopped."""

    wanted: bool = False

    def begin_again(self) -> NoReturn:
        """Replace this process. All parts of the agent must have stopped."""
        os.execv(sys.executable, [sys.executable, "-m", "holdfast.agent"])


@dataclass(slots=True)
class Restarts:
    """Executes `RestartAgent`."""

    node: str
    tasks: TaskGroup
    workers: Callable[[], Sequence[RunningWorker]]
    restart: Restart | None  # None = the process cannot start a new agent

    @property
    def possible(self) -> bool:
        return self.restart is not None

    def require_staying(self) -> None:
        """Raises `Conflict` while the agent is about to end, because new work would end with it."""
        if self.restart is not None and self.restart.wanted:
            raise Conflict(f"the agent of {self.node} is about to be replaced by a new one")

    def carry_out(self, order: RestartAgent) -> Outcome:
        """Raises `Conflict` if workers run on this node, or if the process cannot start a new agent."""
        if self.restart is None:
            raise Conflict(f"the agent of {self.node} cannot be replaced: it does not run as a separate service")
        if workers := self.workers():
            raise Conflict(f"the agent of {self.node} stays while workers run on it: {named_workers(workers)}")
        if not self.restart.wanted:
            self.restart.wanted = True
            log.warning("this agent is replaced by a new one", cause=order.cause)
            self.tasks.start_soon(self._end, name="restart")
        return Outcome(reason="the agent restarts")

    async def _end(self) -> None:
        await anyio.sleep(SAID_S)
        signal.raise_signal(signal.SIGTERM)
