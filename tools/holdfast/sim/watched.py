"""The leader's batches, observed: which events were folded, one after the other, and what followed from each.

`Watched` is production's batch. `Planted` folds each event by a function that a test replaces, to plant a bug in the core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from holdfast.domain.evolve import evolve
from holdfast.sim.world import Violation
from holdfast.supervisor.core import Batch, State, Written, as_sends, step
from holdfast.supervisor.protocol import Command, Event, NodeReported

Step = Callable[[State, Event], tuple[State, tuple[Command, ...]]]


class Fold(NamedTuple):
    """One event and its effect. Reports of nodes that were folded together have their commands with the first of them."""

    before: State
    event: Event
    after: State
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    at: float
    events: tuple[Event, ...]
    reports: bool
    commands: tuple[Command, ...]


class Watched(Batch):
    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.begun = state
        self.groups: list[_Group] = []
        self.error: Exception | None = None  # the last event that could not be folded

    def step(self, event: Event) -> tuple[Command, ...]:
        try:
            commands = super().step(event)
        except Exception as error:
            self.error = error
            raise
        self.groups.append(_Group(event.at, (event,), False, commands))
        return commands

    def reports(self, at: float, events: Sequence[NodeReported]) -> tuple[Command, ...]:
        try:
            commands = super().reports(at, events)
        except Exception as error:
            self.error = error
            raise
        self.groups.append(_Group(at, self._shown(at, events), True, commands))
        return commands

    def _shown(self, at: float, events: Sequence[NodeReported]) -> tuple[Event, ...]:
        """The reports that the promises see, as they were folded."""
        return tuple(evolve(event, at=at) for event in events)

    def folds(self, after: State) -> Iterator[Fold]:
        """Yield the folds of the batch, which ended with `after`. Raises `Violation` if a batch of several events decided
        differently from batches of one event each."""
        state = self.begun
        for group in self.groups:
            if len(self.groups) == 1:
                before, state, commands = state, after, group.commands
            else:
                alone = Batch(state)
                commands = alone.reports(group.at, group.events) if group.reports else alone.step(group.events[0])  # type: ignore[arg-type]
                before, state = state, alone.state
                if commands != group.commands:
                    raise Violation(f"a batch decides differently about {group.events[0]}")
            yield Fold(before, group.events[0], state, as_sends(commands))
            for event in group.events[1:]:
                yield Fold(before, event, state, ())
        if self.groups and state != after:
            raise Violation(f"a batch of {len(self.groups)} events ends in another state than its events one by one")


class Unrepeated(Watched):
    """A batch that is not folded again one by one, which would take twice as long. Each fold shows the batch's states, the
    first of its reports, and broadcasts as such."""

    def _shown(self, at: float, events: Sequence[NodeReported]) -> tuple[Event, ...]:
        return (evolve(events[0], at=at),)

    def folds(self, after: State) -> Iterator[Fold]:
        for group in self.groups:
            yield Fold(self.begun, group.events[0], after, group.commands)


class Planted(Watched):
    """Folds the events one by one with `fold`."""

    def __init__(self, state: State, fold: Step) -> None:
        super().__init__(state)
        self._fold_one, self._now = fold, state
        self._folds: list[Fold] = []

    @property
    def state(self) -> State:
        return self._now

    @property
    def written(self) -> Written:
        return _Every(self.begun, self._now)

    def step(self, event: Event) -> tuple[Command, ...]:
        before = self._now
        try:
            self._now, commands = self._fold_one(before, event)
        except Exception as error:
            self.error = error
            raise
        self._folds.append(Fold(before, event, self._now, commands))
        return commands

    def reports(self, at: float, events: Sequence[NodeReported]) -> tuple[Command, ...]:
        return tuple(command for event in events for command in self.step(evolve(event, at=at)))

    def folds(self, after: State) -> Iterator[Fold]:
        yield from self._folds


class _Every(Mapping[str, Mapping[Any, None]]):
    """Every row of every table, as the rows that may have changed."""

    def __init__(self, before: State, after: State) -> None:
        self._states = (before, after)

    def __getitem__(self, table: str) -> Mapping[Any, None]:
        before, after = (getattr(state, table) for state in self._states)
        return dict.fromkeys((*before, *after))

    def __iter__(self) -> Iterator[str]:
        return iter(each.name for each in fields(State) if isinstance(getattr(self._states[1], each.name), Mapping))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def batch_of(fold: Step) -> Callable[[State], Watched]:
    return Watched if fold is step else lambda state: Planted(state, fold)
