"""A service that is late with folding: nobody who goes on talking is taken for silent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, cast

import anyio
import pytest
from diagnosing import CATALOGUE, T0
from waiting import VIRTUAL_TIME

from holdfast.diagnostics import detectors
from holdfast.diagnostics.backlog import Backlog
from holdfast.diagnostics.detectors.liveness import UNWITNESSED_GRACE_S
from holdfast.diagnostics.engine import Engine
from holdfast.diagnostics.ingest import TelemetryServicer
from holdfast.diagnostics.intake import Intake
from holdfast.diagnostics.publisher import Publisher
from holdfast.domain.findings import FindingKind
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.signals import GenerationStarted, Tick
from holdfast.log.memory import MemoryLog
from holdfast.log.names import FINDINGS
from holdfast.v1 import telemetry_pb2 as pb
from holdfast.wire.events import decode_finding
from holdfast.wire.telemetry import encode_tick

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", [VIRTUAL_TIME], ids=["virtual"])]

TALKING_S = 30.0  # six times what silence takes
HEARD = GenerationStarted("n0", T0, "gpt", 1, Mesh.of({"dp": 1}), (0,), HangSpec())


class Context:
    """The server's end of a stream, as far as acknowledgements need it."""

    def __init__(self) -> None:
        self.acknowledged = anyio.Event()

    async def write(self, _: pb.TickAck) -> None:
        self.acknowledged.set()


async def test_ticks_that_wait_to_be_folded_are_signs_of_life_and_silence_is_none() -> None:
    log = MemoryLog()

    def clock() -> float:
        return T0 + anyio.current_time()

    publisher, backlog = Publisher(log, clock=clock), Backlog()
    intake = Intake(Engine(detectors.standard(CATALOGUE)), publisher, clock=clock)
    servicer = TelemetryServicer(intake, backlog, publisher, clock=clock)
    context, falls_silent = Context(), anyio.Event()

    async def agent() -> AsyncIterator[pb.Tick]:
        yield encode_tick(Tick("n0", "a", 1, clock(), (HEARD,)))
        for seq in range(2, 2 + int(TALKING_S)):
            await anyio.sleep(1.0)
            yield encode_tick(Tick("n0", "a", seq, clock()))
        falls_silent.set()
        await anyio.sleep_forever()

    async def lost() -> list[str]:
        findings = [decode_finding(delivery.entry.data) for delivery in await log.read(FINDINGS)]
        return [finding.node for finding in findings if finding.kind is FindingKind.NODE_LOST]

    async with anyio.create_task_group() as tasks, anyio.create_task_group() as folding:
        tasks.start_soon(publisher.publish_findings)
        tasks.start_soon(intake.watch_clock)
        tasks.start_soon(servicer.Stream, agent(), cast(Any, context))
        folding.start_soon(backlog.fold)
        await context.acknowledged.wait()
        folding.cancel_scope.cancel()  # from here on nothing is folded
        with anyio.CancelScope(shield=True):
            await falls_silent.wait()
            assert await lost() == []
            await anyio.sleep(UNWITNESSED_GRACE_S + 5.0)
            assert await lost() == ["n0"]
        tasks.cancel_scope.cancel()
