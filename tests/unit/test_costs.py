"""What an event of a healthy run costs does not depend on how many nodes the job has. Calls are counted, not seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from benchmarks.detection.deciding import running_fleet
from holdfast.diagnostics import detectors
from holdfast.diagnostics.catalogue import xid
from holdfast.diagnostics.engine import Engine
from holdfast.domain.evolve import evolve
from holdfast.domain.job import HangSpec
from holdfast.domain.mesh import Mesh
from holdfast.domain.nodes import Notice
from holdfast.domain.orders import RanksStepping
from holdfast.domain.signals import (
    ClockTick,
    GenerationStarted,
    NodeBeat,
    NodeConnected,
    Phase,
    RankProgress,
    StepColumns,
)
from holdfast.supervisor.core import State, step
from holdfast.supervisor.core.model.indexing import index_of
from holdfast.supervisor.protocol import Event, NodeReported, StepsCompleted

AT = 1_700_000_000.0
SIZES = (16, 512)


def calls(function: Callable[..., Any], *arguments: object) -> int:
    """Python frames that are entered, generators and comprehensions each time that they go on."""
    count = 0

    def seen(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        function(*arguments)
    finally:
        sys.setprofile(None)
    return count


EVENTS: dict[str, Event] = {
    "a step": StepsCompleted(AT + 60, "job0", 1, 51, AT + 60, 1, 10.0),
    "a report of a node": NodeReported(AT + 60, "n3", "a", 2, RanksStepping("job0", 1, (3,), 51, AT + 60), 1),
}


def fleet_of(nodes: int, *, noticed: bool) -> State:
    """One job on all nodes, and a spare that is out of service and announced for maintenance."""
    state = running_fleet(nodes, nodes, 1, AT)
    if noticed:
        spare = evolve(
            state.nodes["s0"], unschedulable_reason="cordoned", notices=(Notice("file", "reboot", AT, AT + 1e6),)
        )
        state = evolve(state, nodes={**state.nodes, "s0": spare})
    return state.indexed(index_of(state))


@pytest.mark.parametrize("noticed", [False, True])
@pytest.mark.parametrize("event", EVENTS)
def test_the_supervisor_looks_at_what_changed_and_not_at_every_member(event: str, noticed: bool) -> None:
    small, large = (fleet_of(nodes, noticed=noticed) for nodes in SIZES)
    for fleet in (small, large):
        step(fleet, EVENTS[event])  # whatever is made once
    assert calls(step, large, EVENTS[event]) == calls(step, small, EVENTS[event])


def engine_of(nodes: int) -> Engine:
    engine, mesh = Engine(detectors.standard(xid.load())), Mesh.of({"dp": nodes})
    for rank in range(nodes):
        engine.fold(NodeConnected(f"n{rank}", AT, "a"), AT)
        engine.fold(GenerationStarted(f"n{rank}", AT, "job", 1, mesh, (rank,), HangSpec()), AT)
        engine.fold(progress(rank, 0), AT)
    return engine


def progress(rank: int, done: int) -> RankProgress:
    return RankProgress(f"n{rank}", AT, "job", 1, (rank,), (done,), (Phase.STEP,), (AT,), ("S",), (1.0,), (-1,))


def test_so_does_diagnostics() -> None:
    nothing = (0.0,)
    columns = StepColumns("n3", AT, "job", 1, (3,), (1,), (AT,), (AT + 1,), nothing, nothing, (1,), (2.0,), (1.0,))
    counts = []
    for nodes in SIZES:
        engine = engine_of(nodes)
        signals = NodeBeat("n3", AT + 1), progress(3, 1), columns, ClockTick(AT + 1)
        for signal in signals[:2]:
            engine.fold(signal, AT + 0.5)  # whatever is made once
        counts.append([calls(engine.fold, signal, AT + 1) for signal in signals])
    assert counts[0] == counts[1]
