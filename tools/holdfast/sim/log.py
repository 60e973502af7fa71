"""The simulated event log: its entries survive every other process, but not always a restart of the log itself.

A log that flushes once a second and loses power returns to its state at one moment of its last second: entries, positions and
the leader's snapshot together. The effects of the lost entries on nodes remain.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from holdfast.sim.world import World
from holdfast.supervisor.core import State
from holdfast.supervisor.protocol import Event

FLUSHED_S = 1.0


@dataclass(frozen=True, slots=True)
class _Moment:
    at: float
    state: State
    inbox: tuple[Event, ...]
    epoch: int


class Log:
    def __init__(self, world: World, state: State, *, flushes_late: bool = False) -> None:
        """`flushes_late`: the last second of the log can be lost."""
        self.world = world
        self.state = state  # as last committed
        self.inbox: deque[Event] = deque()  # its left end is the first entry not acknowledged
        self.epoch = 0
        self._flushes_late = flushes_late
        self._moments: deque[_Moment] = deque()  # oldest first; one of them is older than the last second
        self._written()

    def append(self, event: Event) -> None:
        self.inbox.append(event)
        self._written()

    def commit(self, state: State, *, acknowledge: bool) -> None:
        """Write the state and acknowledge the input, atomically."""
        self.state = state
        if acknowledge:
            self.inbox.popleft()
        self._written()

    def elect(self, clock: float) -> int:
        """Return a new epoch, which is higher than all before, including those that were lost with the data."""
        self.epoch = max(self.epoch + 1, int(clock))
        self._written()
        return self.epoch

    def lose_tail(self, lost_s: float) -> None:
        """Restart with the data of `lost_s` ago, at most a second."""
        moment = self._moments[0]
        for each in self._moments:
            if each.at <= self.world.now - lost_s:
                moment = each
        self._restart(moment.state, moment.inbox, moment.epoch)

    def lose_everything(self, state: State) -> None:
        self._restart(state, (), 0)

    def _restart(self, state: State, inbox: tuple[Event, ...], epoch: int) -> None:
        self.state, self.inbox, self.epoch = state, deque(inbox), epoch
        self._moments.clear()
        self._written()

    def _written(self) -> None:
        if not self._flushes_late:
            return
        self._moments.append(_Moment(self.world.now, self.state, tuple(self.inbox), self.epoch))
        while len(self._moments) > 1 and self._moments[1].at <= self.world.now - FLUSHED_S:
            self._moments.popleft()
