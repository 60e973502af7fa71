"""Resets GPUs with the operator's command (`HOLDFAST_GPU_RESET_COMMAND`), if that is safe, and tests the node afterwards.

A reset ends all programs on the GPU. So it is refused while this node has workers, and if any process still has one of the
devices open after `FREE_WITHIN_S`. The refusal names the processes. The agent's own readers and tests close the GPUs during the
reset.

GPUs that are connected by NVLink are reset together, because the driver refuses to reset one end of a link that is in use. If
NVML has reported links, or it is not known whether there are any, `together="auto"` means all GPUs of the node. GPUs for which
the driver requests a reset are always included.

The order succeeds only if the tests of the node pass afterwards.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass

import anyio
import structlog

from holdfast.agent.gpus.gpu_devices import GpuDevices, Holder
from holdfast.agent.gpus.gpu_states import LastReadings
from holdfast.agent.outcome import Outcome
from holdfast.domain.errors import Conflict
from holdfast.domain.nodes import RunningWorker
from holdfast.domain.orders import ResetGpu
from holdfast.runtime.processes import operator_command
from holdfast.runtime.telling import telemetry

log = structlog.get_logger("holdfast.agent.gpus.gpu_reset")

COMMAND_TIMEOUT_S = 90.0  # if the order has no limit
FREE_WITHIN_S = 10.0  # a process that has just been killed closes its devices in the driver, which takes seconds
LOOK_S = 0.2
_HOLDERS_MAX = 8
_NO_ACTION, _RESETS = 0, frozenset({1, 4, 6})  # NVML's recovery actions: none; GPU reset, drain and reset, bus reset


@dataclass(frozen=True, slots=True)
class ResetRules:
    """The operator's settings. `command` contains `{gpu}`, which becomes GPU numbers separated by commas; empty = no resets."""

    command: str
    together: str = "auto"  # "auto", "all" or "one"
    stops: tuple[str, ...] = ()  # programs that the command itself stops, which may have a device open before

    @property
    def possible(self) -> bool:
        """Whether there is a command, and its program exists on this node."""
        return operator_command.exists(self.command)

    def words(self, gpus: Sequence[int]) -> list[str]:
        listed = ",".join(map(str, gpus))
        return [word.replace("{gpu}", listed) for word in shlex.split(self.command)]


class GpuResets(LastReadings):
    """Executes `ResetGpu`, one at a time.

    The context `quiet` stops the agent's readers of the GPUs, and the context `held` its tests. `test` tests the node and
    returns the failures; "" = none.
    """

    def __init__(
        self,
        rules: ResetRules,
        *,
        devices: GpuDevices,
        workers: Callable[[], Sequence[RunningWorker]],
        quiet: Callable[[], AbstractAsyncContextManager[None]],
        held: Callable[[], AbstractContextManager[None]],
        test: Callable[[], Awaitable[str]],
        free_within_s: float = FREE_WITHIN_S,
    ) -> None:
        super().__init__()
        self._rules, self._devices = rules, devices
        self._workers, self._quiet, self._held, self._test = workers, quiet, held, test
        self._free_within_s = free_within_s
        self._lock = anyio.Lock()

    @property
    def possible(self) -> bool:
        return self._rules.possible

    async def finished(self) -> None:
        """Wait until no reset is in progress, because workers that are forked during a reset would open the devices."""
        async with self._lock:
            pass

    async def carry_out(self, order: ResetGpu) -> Outcome:
        """Raises `Conflict` if a reset is not safe or the tests after it fail, `Unavailable` if the command fails."""
        if not self.possible:
            raise Conflict("no command resets GPUs on this node: set HOLDFAST_GPU_RESET_COMMAND")
        async with self._lock:
            gpus = self.together(order.gpus)
            named = f"GPU {listed(gpus)}"
            self._refuse_with_workers(named)
            began = time.monotonic()
            with self._held():
                async with self._quiet():
                    await self._wait_until_free(gpus, named)
                    self._refuse_with_workers(named)
                    with telemetry.span("gpu reset", job=order.job):
                        words = self._rules.words(gpus)
                        output = await operator_command.run("gpu-reset", words, order.timeout_s or COMMAND_TIMEOUT_S)
                reset_at = time.monotonic()
                failures = await self._test()
            tested_at = time.monotonic()
        if failures:
            raise Conflict(f"{named} was reset, but the node's pre-flight test failed afterwards: {failures}")
        log.info("GPUs reset", gpus=gpus, said=output)
        phases = (("gpu_reset", reset_at - began), ("self_test", tested_at - reset_at))
        return Outcome(phases_s=phases, reason=output)

    def together(self, gpus: Sequence[int]) -> tuple[int, ...]:
        """Return the GPUs to reset if `gpus` need a reset. Empty `gpus` = all."""
        every = tuple(self._sample.gpu) if self._sample is not None else tuple(self._devices.minors())
        if not gpus:
            return every or (0,)
        wanted = set(gpus)
        if self._sample is not None:
            actions = zip(self._sample.gpu, self._sample.recovery_action, strict=True)
            wanted.update(gpu for gpu, action in actions if action in _RESETS)
        linked = self._health is None or any(
            links != 0 for links in (*self._health.nvlinks_up, *self._health.nvlinks_down)
        )
        if self._rules.together == "all" or (self._rules.together == "auto" and linked):
            wanted.update(every)
        return tuple(sorted(wanted))

    def _refuse_with_workers(self, named: str) -> None:
        if workers := self._workers():
            raise Conflict(f"{named} is not reset while workers run on this node: {named_workers(workers)}")

    async def _wait_until_free(self, gpus: Sequence[int], named: str) -> None:
        until = anyio.current_time() + self._free_within_s
        while holders := await anyio.to_thread.run_sync(self._holders, gpus):
            if anyio.current_time() >= until:
                shown = "; ".join(map(str, holders[:_HOLDERS_MAX]))
                more = f"; and {len(holders) - _HOLDERS_MAX} more" if len(holders) > _HOLDERS_MAX else ""
                raise Conflict(f"{named} is not reset while a process uses it: {shown}{more}")
            await anyio.sleep(LOOK_S)

    def _holders(self, gpus: Sequence[int]) -> list[Holder]:
        return self._devices.holders(gpus, except_for=self._rules.stops)


def listed(gpus: Sequence[int]) -> str:
    return ", ".join(map(str, gpus))


def named_workers(workers: Sequence[RunningWorker]) -> str:
    return ", ".join(f"rank {worker.rank} of {worker.job} (pid {worker.pid})" for worker in workers[:_HOLDERS_MAX])
