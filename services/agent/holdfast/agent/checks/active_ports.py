"""Checks whether the InfiniBand and RoCE ports that have been active since the agent's start are still active.

A port that was never active may have no cable, and proves nothing about the node. A port that is no longer active has
failed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from holdfast.agent.checks import preflight_checks
from holdfast.domain.nodes import Check
from holdfast.domain.signals import NicSample, NodeSignal


class ActivePorts:
    """`read` reads the ports now; None = the node has no ports."""

    def __init__(self, read: Callable[[], Awaitable[NicSample]] | None) -> None:
        self._read = read
        self._seen: set[tuple[str, int]] = set()  # (device, port)

    def watch(self, signal: NodeSignal) -> None:
        if isinstance(signal, NicSample):
            columns = zip(signal.device, signal.port, signal.state, strict=True)
            self._seen.update((device, port) for device, port, state in columns if state == preflight_checks.ACTIVE)

    async def check(self) -> list[Check]:
        """Return one check, or none if no port has been active."""
        if self._read is None or not self._seen:
            return []
        try:
            sample = await self._read()
        except OSError as error:
            return [Check("ports", None, f"cannot be read: {error.strerror}")]
        return [preflight_checks.ports(sample, self._seen)]
