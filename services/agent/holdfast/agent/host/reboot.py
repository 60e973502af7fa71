"""Boots the machine with the operator's command (`HOLDFAST_REBOOT_COMMAND`), if no worker runs on the node.

The command ends before the machine goes down, so the answer to the order states only that the command was accepted. From then
on the agent starts no work, until it ends with its machine or `_GOES_DOWN_S` have passed.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio
import structlog

from holdfast.agent.gpus.gpu_reset import named_workers
from holdfast.agent.outcome import Outcome
from holdfast.domain.errors import Conflict
from holdfast.domain.nodes import RunningWorker
from holdfast.domain.orders import RebootNode
from holdfast.runtime.processes import operator_command

log = structlog.get_logger("holdfast.agent.host.reboot")

COMMAND_TIMEOUT_S = 60.0  # if the order has no limit
_GOES_DOWN_S = 600.0  # after this time the machine will not go down any more, even if the command reported success


@dataclass(slots=True)
class Reboots:
    """Executes `RebootNode`. `command`: run without a shell; `{node}` becomes the node's name; empty = no reboots."""

    command: str
    node: str
    workers: Callable[[], Sequence[RunningWorker]]
    _until: float = 0.0  # the event loop's time before which no work is started

    @property
    def possible(self) -> bool:
        return operator_command.exists(self.command)

    def require_up(self) -> None:
        """Raises `Conflict` while the machine is about to go down."""
        if anyio.current_time() < self._until:
            raise Conflict(f"{self.node} is about to boot: the supervisor ordered it")

    async def carry_out(self, order: RebootNode) -> Outcome:
        """Raises `Conflict` if workers run on this node or no command is set, `Unavailable` if the command fails."""
        if not self.possible:
            raise Conflict("no command boots this node: set HOLDFAST_REBOOT_COMMAND")
        self._refuse_with_workers()
        words = [word.replace("{node}", self.node) for word in shlex.split(self.command)]
        self._until = anyio.current_time() + _GOES_DOWN_S
        log.warning("booting this machine", command=shlex.join(words), cause=order.cause)
        try:
            output = await operator_command.run("reboot", words, order.timeout_s or COMMAND_TIMEOUT_S)
        except BaseException:
            self._until = 0.0
            raise
        return Outcome(reason=output)

    def _refuse_with_workers(self) -> None:
        if workers := self.workers():
            raise Conflict(f"{self.node} is not booted while workers run on it: {named_workers(workers)}")
