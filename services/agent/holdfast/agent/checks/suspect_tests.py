"""Runs the quick tests of a suspected node while it prepares: devices and their memory, links, ports, disk.

The tests have a time budget, and a preparation never waits longer. A test that has not finished by then has no result, which
proves nothing about the node. The devices are tested in a separate process, which is killed at the end of the budget. The tests
do not wait for its exit, because a process in a hanging driver call cannot be killed.

Two things are not tested. Detectors evaluate GPUs that must be reset and ECC counts, and recommend their own actions. Whether
other nodes can be reached shows when the process group is formed, and a partition would take many nodes out of service."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import anyio
import structlog
from anyio.abc import TaskGroup

from holdfast.agent.checks import preflight_checks
from holdfast.domain.errors import HoldfastError
from holdfast.domain.nodes import Check, Preflight
from holdfast.domain.signals import GpuSample, NodeSignal
from holdfast.runtime import freeze

log = structlog.get_logger("holdfast.agent.checks.suspect_tests")

DEVICES_SHARE = 0.75  # of the budget; then the process prints its results and ends

TestQuickly = Callable[[float, float], Awaitable[str]]  # (time limit, timeout in seconds) → output of the self-test
Test = Callable[[], Awaitable[list[Check]]]


@dataclass(slots=True)
class _Round:
    """The tests of one order. `over` is set when all have ended or one has failed."""

    tests: dict[str, Test]
    found: dict[str, list[Check]] = field(default_factory=dict)
    over: anyio.Event = field(default_factory=anyio.Event)
    scopes: list[anyio.CancelScope] = field(default_factory=list)

    async def make(self, name: str, scope: anyio.CancelScope) -> None:
        with scope:
            try:
                self.found[name] = await self.tests[name]()
            except Exception as error:  # a bug of the test must not end the agent, and proves nothing about the node
                log.exception("test of a suspected node failed", test=name)
                self.found[name] = [Check(name, None, f"cannot be tested: {type(error).__name__}: {error}")]
            if self.found.keys() >= self.tests.keys() or self.failed:
                self.over.set()

    def end(self) -> None:
        for scope in self.scopes:
            scope.cancel()

    @property
    def failed(self) -> bool:
        return any(check.ok is False for check in self.checks)

    @property
    def checks(self) -> list[Check]:
        return [check for name in sorted(self.found) for check in self.found[name]]


class SuspectTests:
    """`make` is called by an order. `tasks` outlives the order. `gpus_are_real`: NVML's answers are not a recording. `failed`
    receives every result with a failure."""

    def __init__(
        self,
        tasks: TaskGroup,
        *,
        test_devices: TestQuickly,
        test_disk: Callable[[], Awaitable[Check]],
        test_ports: Callable[[], Awaitable[list[Check]]],
        gpus_are_real: bool,
        failed: Callable[[Preflight], None],
    ) -> None:
        self._tasks = tasks
        self._test_devices, self._test_disk, self._test_ports = test_devices, test_disk, test_ports
        self._gpus_are_real, self._failed = gpus_are_real, failed
        self._sample: GpuSample | None = None

    def watch(self, signal: NodeSignal) -> None:
        """Store NVML's last reading."""
        if isinstance(signal, GpuSample):
            self._sample = signal

    async def make(self, budget_s: float) -> Preflight:
        """Test for at most `budget_s` seconds. Ends early at the first failure."""
        began = anyio.current_time()
        now = _Round(self._tests(budget_s))
        for name in now.tests:
            now.scopes.append(anyio.CancelScope())
            self._tasks.start_soon(now.make, name, now.scopes[-1], name=f"suspect test {name}")
        try:
            with freeze.patience(budget_s):
                await now.over.wait()
        finally:
            now.end()
        checks = now.checks
        if not now.failed:
            late = f"not concluded within {budget_s:g} s"
            checks += [Check(name, None, late) for name in sorted(now.tests.keys() - now.found.keys())]
        tested = Preflight(time.time(), anyio.current_time() - began, tuple(checks))
        results = {check.name: check.ok for check in checks}
        log.info(
            "suspected node tested",
            duration_s=round(tested.duration_s, 2),
            failures=tested.failures or "none",
            checks=results,
        )
        if tested.failures:
            self._failed(tested)
        return tested

    def _tests(self, budget_s: float) -> dict[str, Test]:
        tests: dict[str, Test] = {
            "products": partial(self._devices, budget_s),
            "disk": self._disk,
            "ports": self._test_ports,
        }
        if self._sample is not None:
            tests["gpus"] = self._gpus
        return tests

    async def _devices(self, budget_s: float) -> list[Check]:
        gpus = len(self._sample.gpu) if self._sample is not None and self._gpus_are_real else 0
        try:
            return preflight_checks.quick(await self._test_devices(DEVICES_SHARE * budget_s, budget_s), gpus=gpus)
        except (HoldfastError, OSError) as error:  # no worker template, or a test that did not end by itself
            return [Check("products", None, f"cannot be tested: {error}"[: preflight_checks.DETAIL_CHARS_MAX])]

    async def _disk(self) -> list[Check]:
        return [await self._test_disk()]

    async def _gpus(self) -> list[Check]:
        return [] if self._sample is None else [preflight_checks.gpus_present(self._sample)]
