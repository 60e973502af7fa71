"""The orderly end of an agent after SIGTERM or SIGUSR1: its ranks are moved first, as before a maintenance.

    SIGTERM ──► a notice, which begins at the end of the grace ──► the job saves, and its ranks move or end ──► no workers left
                      └── not moved in time, or a second signal ──► the agent ends, and its workers with it

When an allocation ends, all agents of a job end at once, and no node can take the ranks. The last save can then be restored
only if the agents finish its copies before they end.

Kubernetes, Slurm and an owner that takes a machine back send SIGTERM and wait. Without the notice, the node would be lost and
the steps since the last checkpoint would be repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio
import structlog

from holdfast.domain.nodes import TERMINATION
from holdfast.domain.signals import MaintenanceNotice

log = structlog.get_logger("holdfast.agent")

POLL_S = 0.1


class Leaving:
    def __init__(
        self,
        node: str,
        incarnation: str,
        grace_s: float,
        handover_s: float,
        *,
        workers: Callable[[], object],
        copies: Callable[[], bool],
        emit: Callable[[MaintenanceNotice], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`handover_s`: for how long other nodes may restore from here after the last worker has ended. `copies`: whether
        copies of this node's newest save are still missing."""
        self._node, self._incarnation, self._grace_s, self._handover_s = node, incarnation, grace_s, handover_s
        self._workers, self._copies, self._emit, self._clock = workers, copies, emit, clock

    async def carry_out(self) -> None:
        """Return when the agent may end: at once if it has no workers, and at the latest at the end of the grace."""
        if self._grace_s <= 0 or not self._workers():
            return
        at = self._clock()
        event = "its agent was asked to end"
        log.warning("leaving: the job is asked to move its ranks", grace_s=self._grace_s)
        self._emit(MaintenanceNotice(self._node, at, TERMINATION, event, at + self._grace_s, self._incarnation))
        with anyio.move_on_after(self._grace_s) as grace:
            while self._workers():  # noqa: ASYNC110 - several parts end them
                await anyio.sleep(POLL_S)
            log.info("leaving: no workers are left here", handover_s=self._handover_s)
            await anyio.sleep(self._handover_s)
            while self._copies():  # noqa: ASYNC110 - another process makes them
                await anyio.sleep(POLL_S)
        if grace.cancelled_caught and self._workers():
            log.warning("leaving: the grace is over, and workers are left; they end with the agent")
