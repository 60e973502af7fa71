"""Whatever an agent says: refused with the field's name, passed over and counted, or folded. Nothing else is raised."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import anyio
import pytest
from diagnosing import CATALOGUE, T0, Fleet
from garbage import parts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.diagnostics import detectors
from holdfast.diagnostics.engine import Engine, Folded
from holdfast.diagnostics.intake import Intake
from holdfast.diagnostics.plausible import Plausibility
from holdfast.diagnostics.publisher import Publisher
from holdfast.diagnostics.ticks import NodeStream
from holdfast.domain.errors import MalformedMessage
from holdfast.domain.nodes import PROTOCOL_VERSION
from holdfast.domain.signals import ClockTick, NodeSignal, ObservedSteps, Signal, StepColumns, Tick
from holdfast.log.memory import MemoryLog
from holdfast.v1 import telemetry_pb2 as pb
from holdfast.wire.events import finding_entry, step_entries
from holdfast.wire.telemetry import decode_tick


class WrittenEngine(Engine):
    """Everything that leaves it can be written."""

    def fold(self, signal: Signal, now: float) -> Folded:
        folded = super().fold(signal, now)
        for finding in folded.findings:
            finding_entry(finding)
        step_entries(sorted(folded.steps, key=lambda record: (record.job, record.generation, record.world_size)))
        return folded


async def survive(said: list[dict[str, Any]]) -> None:
    engine, fleet = WrittenEngine(detectors.standard(CATALOGUE)), Fleet(nodes=2, ranks_per_node=2)
    now = T0
    intake = Intake(engine, Publisher(MemoryLog(), clock=lambda: now), clock=lambda: now)
    stream = NodeStream()
    await intake.tick(stream, Tick("n0", "a", 1, T0, (dataclasses.replace(fleet.started("n0"), job="j"),)))
    for seq, part in enumerate(said, 2):
        now += 7.0
        named = {**part, "node": "n0", "incarnation": "a", "seq": seq, "protocol_version": PROTOCOL_VERSION}
        with contextlib.suppress(MalformedMessage):
            await intake.tick(stream, decode_tick(pb.Tick(**named)))
        engine.fold(ClockTick(now), now)


@given(said=st.lists(parts(pb.Tick.DESCRIPTOR), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_no_tick_is_too_strange(said: list[dict[str, Any]]) -> None:
    anyio.run(survive, said)


def columns(**fields: Any) -> StepColumns:
    fleet = Fleet(nodes=1, ranks_per_node=2)
    return dataclasses.replace(fleet.columns("n0", (0, 1)), **fields)


def observed(**fields: Any) -> ObservedSteps:
    steps = columns()
    blocks = ObservedSteps(
        steps.node,
        steps.at,
        steps.job,
        steps.generation,
        (0, 1),
        (8, 8),
        (8, 8),
        (T0 - 1.0,) * 2,
        (T0,) * 2,
        (0.1, 0.2),
    )
    return dataclasses.replace(blocks, **fields)


@pytest.mark.parametrize(
    ("signal", "reason"),
    [
        (observed(rank=(0, 7)), "ObservedSteps: a rank that its generation does not have"),
        (observed(started_at=(T0, math.nan)), "ObservedSteps: an impossible time"),
        (observed(ended_at=(T0, 1e300)), "ObservedSteps: an impossible time"),
        (observed(ended_at=(T0 - 9.0, T0)), "ObservedSteps: a step that ends before it starts"),
        (observed(comm_wait_s=(math.inf, 0.0)), "ObservedSteps: an impossible time"),
        (observed(comm_wait_s=(-1.0, 0.0)), "ObservedSteps: a negative duration"),
        (observed(steps=(0, 8)), "ObservedSteps: a block without steps"),
        (columns(rank=(0, 7)), "StepColumns: a rank that its generation does not have"),
        (columns(started_at=(T0, math.nan)), "StepColumns: an impossible time"),
        (columns(data_s=(math.inf, 0.0)), "StepColumns: an impossible time"),
        (columns(ended_at=(T0 - 9.0, T0)), "StepColumns: a step that ends before it starts"),
        (columns(started_at=(-5.0, T0 - 1.0)), "StepColumns: an impossible time"),
        (columns(ended_at=(T0, 1e300)), "StepColumns: an impossible time"),
        (columns(stall_s=(-1.0, 0.0)), "StepColumns: a negative duration"),
        (columns(tokens=(2**63, 1)), "StepColumns: a token count above the maximum"),
        (columns(step=(2**64 - 1, 1)), "StepColumns: a step number above the maximum"),
        (
            dataclasses.replace(Fleet(nodes=1).progress("n0"), rank=(2**32 - 1,)),
            "RankProgress: a rank that its generation does not have",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_true_is_passed_over_and_counted(signal: NodeSignal, reason: str) -> None:
    screen = Plausibility()
    screen.screen([Fleet(nodes=1, ranks_per_node=2).started("n0")])
    good = columns()
    for _ in range(3):
        assert screen.screen([signal, good]) == ((good,), (reason,))
    assert screen.rejected == {reason: 3}


def test_a_generation_that_is_not_known_is_left_to_those_who_know_it() -> None:
    assert Plausibility().screen([columns(rank=(10**6, 1))])[1] == ()
    assert (
        Plausibility().screen([columns(**{field.name: () for field in dataclasses.fields(StepColumns)[4:]})])[1] == ()
    )
