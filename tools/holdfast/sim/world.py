"""Virtual time: scheduled actions and seeded random numbers. No function waits, and worlds share no state.

Actions of the present time slot are in a heap; those of later slots wait in lists, which become heaps when their slot begins. A
large world has a hundred thousand actions that wait, and a heap of them would be slow.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

SLOTS_PER_S = 64
EVENTS_MAX = 200_000  # a run with more events is an endless loop


_Scheduled = tuple[float, int, Callable[[], None]]


class Violation(AssertionError):
    """A promise was broken. The seed reproduces the run, the trace shows how."""


@dataclass(slots=True)
class World:
    seed: int
    tracing: bool = False
    now: float = 1000.0
    trace: list[str] = field(default_factory=list)
    events_max: int = EVENTS_MAX
    loss: float = 0.0  # fraction of messages that are lost permanently, even if their sender got an acknowledgement
    chance: Random = field(init=False)
    spite: Random = field(init=False)  # used only by hostile worlds, so that other seeds are not changed by hostility
    _heap: list[_Scheduled] = field(default_factory=list)  # of slots up to `_slot`
    _slot: int = 0
    _later: dict[int, list[_Scheduled]] = field(default_factory=dict)  # slot → its actions
    _slots: list[int] = field(default_factory=list)  # a heap: the keys of `_later`
    _count: int = 0
    events: int = 0  # that were executed

    def __post_init__(self) -> None:
        self.chance = Random(self.seed)
        self.spite = Random(f"spite of {self.seed}")

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._count = count = self._count + 1
        if when < self.now:
            when = self.now
        slot = int(when * SLOTS_PER_S)
        if slot <= self._slot:
            heapq.heappush(self._heap, (when, count, action))
        elif (waiting := self._later.get(slot)) is not None:
            waiting.append((when, count, action))
        else:
            self._later[slot] = [(when, count, action)]
            heapq.heappush(self._slots, slot)

    def soon(self, least_s: float, most_s: float, action: Callable[[], None]) -> None:
        """Schedule an action after a random delay. Random delays cause reordering."""
        self.at(self.now + self.chance.uniform(least_s, most_s), action)

    def loses(self, what: Callable[[], str]) -> bool:
        """Return whether this message is lost, by chance. `what` describes the message, if it is lost."""
        lost = self.loss > 0 and self.spite.random() < self.loss
        if lost:
            self.say(f"LOST {what()}")
        return lost

    def say(self, text: str) -> None:
        if self.tracing:
            self.trace.append(f"{self.now - 1000.0:9.3f}  {text}")

    def run(self, until: float, done: Callable[[], bool]) -> bool:
        """Execute actions in the order of time until `done`. Returns False if it is not reached before `until`."""
        heap, heappop = self._heap, heapq.heappop
        for _ in range(self.events_max):
            if done():
                return True
            if not heap and self._slots:
                self._slot = heappop(self._slots)
                self._heap = heap = self._later.pop(self._slot)
                heapq.heapify(heap)
            if not heap or heap[0][0] > until:
                return False
            self.now, _, action = heappop(heap)
            self.events += 1
            action()
        raise Violation(
            f"{self.events_max} events and no end at {self.now - 1000.0:.1f} s: something goes round in circles"
        )
