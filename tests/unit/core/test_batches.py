"""A batch is what its events are one by one, and an event that cannot be folded leaves no trace in it."""

from __future__ import annotations

import pytest

from holdfast.sim.scenario import simulate
from holdfast.supervisor.core import Batch, State, as_sends, step
from holdfast.supervisor.core.model.indexing import index_of
from holdfast.supervisor.core.model.turn import Turn
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.protocol import Command, Event, JobSubmitted, NodeCordonRequested

SEEDS = (3, 5, 10)  # with a harsh quarantine, with an object store, with both


def history(seed: int) -> list[tuple[State, Event, State, tuple[Command, ...]]]:
    """Everything that a leader folded in a hostile run, in order."""
    reported: list[tuple[State, Event, State, tuple[Command, ...]]] = []

    def fold(state: State, event: Event) -> tuple[State, tuple[Command, ...]]:
        after, commands = step(state, event)
        reported.append((state, event, after, commands))
        return after, commands

    simulate(seed, fold=fold)
    return reported


@pytest.mark.parametrize("seed", SEEDS)
def test_a_batch_says_what_its_events_say_one_by_one(seed: int) -> None:
    state, reported = State(), history(seed)
    for start in range(0, len(reported), 7):
        part = reported[start : start + 7]
        batch, alone = Batch(state), state
        for _, event, _, _ in part:
            alone, commands = step(alone, event)
            assert as_sends(batch.step(event)) == commands
        before, state = state, batch.state
        assert state == alone
        assert snapshot.changes(before, state, batch.written) == snapshot.changes(before, state)
        assert state.index is None or state.index == index_of(state)
        assert before.index is None or before.index == index_of(before), "a batch wrote into a state that others see"


def test_an_event_that_cannot_be_folded_leaves_no_trace() -> None:
    events = [event for _, event, _, _ in history(3)][:200]
    batch, alone = Batch(State()), State()
    for number, event in enumerate(events):
        if number % 20 == 10:
            broken = JobSubmitted(event.at, None, "token")  # type: ignore[arg-type]
            with pytest.raises(AttributeError):
                batch.step(broken)
            broken_late = NodeCordonRequested(event.at, "n0", True, _Unprintable())  # type: ignore[arg-type]
            with pytest.raises(ZeroDivisionError):
                batch.step(broken_late)
        alone, _ = step(alone, event)
        batch.step(event)
    assert batch.state == alone


class _Unprintable:
    """A reason that cannot be put into a sentence: folding it fails half-way."""

    def __format__(self, spec: str) -> str:
        raise ZeroDivisionError


# ---------------------------------------------------------------- what is committed of it


@pytest.mark.parametrize("seed", SEEDS)
def test_the_parts_of_all_commits_are_the_state(seed: int) -> None:
    parts: dict[str, bytes] = {}
    committed: State | None = None
    for _, _, after, _ in history(seed)[::3]:
        changes = snapshot.changes(committed, after)
        for name, value in changes.items():
            if value is None:
                parts.pop(name, None)
            else:
                parts[name] = value
        committed = after
        assert snapshot.load(parts) == after
    assert committed is not None
    assert snapshot.changes(committed, committed) == {}


@pytest.mark.parametrize("names", [("notices",), ("workers_version", "ended"), ("inventory", "announced")])
def test_rows_that_are_written_together_are_those_that_are_written_one_by_one(names: tuple[str, ...]) -> None:
    others: dict[str, object] = {
        "notices": (), "workers_version": 99, "ended": (), "inventory": {}, "announced": (),
    }  # fmt: skip
    values = {name: others[name] for name in names}
    for before in [state for seed in SEEDS for state, _, _, _ in history(seed)[50::40]]:
        alone, together = Turn(before, before.folded_at + 1), Turn(before, before.folded_at + 1)
        for turn in (alone, together):
            for name in [*before.nodes][:2]:
                turn.put_node(name, ended=(), ranks_at=7.0)  # written before in the same batch
        for name in before.nodes:
            alone.put_node(name, **values)
        together.put_nodes([(name, values) for name in before.nodes])
        after = together.finish()
        assert after == alone.finish()
        assert (together.touched(), together.removed()) == (alone.touched(), alone.removed())
        assert after.index == index_of(after)
        assert snapshot.changes(before, after, together.written) == snapshot.changes(before, after)


def test_no_rows_change_nothing() -> None:
    turn = Turn(State(born=1.0), 2.0)
    turn.put_nodes([])
    assert turn.finish() == State(born=1.0)
    assert turn.written == {}
