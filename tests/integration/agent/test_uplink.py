"""Several diagnostics: where an agent's telemetry goes when the best of them was away and is back."""

from __future__ import annotations

import time
from collections.abc import Iterator

import anyio
import pytest
from agent_harness import ControlPlane
from waiting import wait_until_async

from benchmarks.soak.relay import Mode, Relay
from holdfast.agent.connection import contact, uplink
from holdfast.agent.connection.outbox import Outbox
from holdfast.agent.connection.uplink import Uplink
from holdfast.domain.signals import KernelLine

pytestmark = pytest.mark.anyio


@pytest.fixture
def planes() -> Iterator[tuple[ControlPlane, ControlPlane]]:
    best, other = ControlPlane(), ControlPlane()
    yield best, other
    best.close()
    other.close()


def relay_to(plane: ControlPlane) -> Relay:
    host, _, port = plane.endpoint.rpartition(":")
    return Relay((host, int(port)))


def uplink_of(node: str) -> Uplink:
    """Of an agent whose workers have said everything."""
    said_all = anyio.Event()
    said_all.set()
    return Uplink(Outbox(node, "a"), standing=lambda: (), sample=lambda at: (), lost=lambda: 0, last_words=said_all)


def texts(plane: ControlPlane) -> list[str]:
    return [signal.text for tick in plane.ticks for signal in tick.signals if isinstance(signal, KernelLine)]


async def test_telemetry_that_nobody_acknowledges_is_cut_until_somebody_does(
    planes: tuple[ControlPlane, ControlPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contact, "GAP_S", 0.5)
    best, _ = planes
    relay, up = relay_to(best), uplink_of("n0")
    assert up.cut_s() == 0.0
    relay.mode = Mode.RESET
    up.use([f"127.0.0.1:{relay.port}"])
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(up.run)
            for _ in range(2):
                await wait_until_async(lambda: up.cut_s() > 0.5, description="a cut")
                relay.mode = Mode.OPEN
                await wait_until_async(lambda: up.cut_s() == 0.0, description="the end of the cut")
                relay.mode = Mode.RESET
            tasks.cancel_scope.cancel()
    finally:
        relay.close()


async def test_agents_meet_at_the_best_diagnostics_again(
    planes: tuple[ControlPlane, ControlPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the nodes of one job would stay on two of them for good, and neither would see all ranks."""
    monkeypatch.setattr(uplink, "RETURN_S", 0.5)
    best, other = planes
    relay, up = relay_to(best), uplink_of("n0")
    up.use([f"127.0.0.1:{relay.port}", other.endpoint])

    def emit(text: str) -> None:
        up.emit(KernelLine("n0", time.time(), text))

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(up.run)
            await wait_until_async(lambda: best.ticks, description="telemetry at the best endpoint")
            relay.mode = Mode.RESET
            emit("while it is away")
            await wait_until_async(lambda: "while it is away" in texts(other), description="telemetry at the other")
            assert other.goodbyes == 0
            relay.mode = Mode.OPEN
            await wait_until_async(lambda: other.goodbyes == 1, description="the goodbye to the other")
            emit("when it is back")
            await wait_until_async(lambda: "when it is back" in texts(best), description="telemetry where it was")
            assert "when it is back" not in texts(other)
            tasks.cancel_scope.cancel()
    finally:
        relay.close()
