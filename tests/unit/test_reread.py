"""What folds of tests read of a state is what snapshots make of it, although only differences are read."""

from __future__ import annotations

from dataclasses import fields

import pytest
from fleet import Fleet, job
from reread import WHOLE_EVERY, Reread

from holdfast.domain.errors import MalformedMessage
from holdfast.domain.evolve import evolve
from holdfast.domain.findings import FindingKind
from holdfast.supervisor.core import State
from holdfast.supervisor.protocol import Command, Event
from holdfast.wire import records


class Recorded(Fleet):
    """A fleet that keeps the state after each fold."""

    def __init__(self, nodes: int) -> None:
        self.states: list[State] = []
        super().__init__(nodes, snapshots=False)

    def fold(self, event: Event) -> tuple[Command, ...]:
        commands = super().fold(event)
        self.states.append(self.state)
        return commands


def history() -> list[State]:
    """Nodes are lost and come back, steps are saved, a job ends, another one waits: rows of all tables come, change and go."""
    fleet = Recorded(6)
    fleet.submit(job(dp=3))
    fleet.run()
    for number in (1, 2, 10):
        fleet.train(number, save=number == 10)
    fleet.find(FindingKind.WORKER_CRASH, "n1", rank=1)
    fleet.run()
    fleet.gone("n2")
    fleet.find(FindingKind.NODE_LOST, "n2", rank=2)
    fleet.run()
    fleet.submit(job(dp=6, min_dp=6, name="other"))
    fleet.connect("n2")
    fleet.wait(100.0)
    fleet.train(20)
    fleet.finish()
    fleet.wait(1000.0)
    return fleet.states


def test_what_is_read_is_what_a_snapshot_of_the_whole_state_gives() -> None:
    reread, states = Reread(), history()
    tables = {each.name for each in fields(State) if each.init and any(getattr(state, each.name) for state in states)}
    assert {"nodes", "jobs", "incidents", "closed", "outbox", "timers", "heard"} <= tables
    for state in states:
        read = reread(state)
        assert read == records.loads(records.dumps(state, State), State)
        assert all(row is not state.nodes[name] for name, row in read.nodes.items())
    assert len(states) > WHOLE_EVERY


def test_a_value_that_cannot_be_read_again_is_noticed_at_once() -> None:
    reread, state = Reread(), history()[-1]
    reread(state)
    spoilt = evolve(state.nodes["n0"], unschedulable_reason=("no text",))
    with pytest.raises(MalformedMessage):
        reread(evolve(state, nodes={**state.nodes, "n0": spoilt}))


def test_a_value_that_is_changed_in_place_is_noticed_after_a_few_folds() -> None:
    reread, state = Reread(), history()[-1]
    reread(state)
    del state.nodes["n0"]  # type: ignore[attr-defined]
    for _ in range(WHOLE_EVERY - 2):
        reread(state)
    with pytest.raises(AssertionError):
        reread(state)
