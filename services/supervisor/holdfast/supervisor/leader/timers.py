"""The core's timers: replaceable, by the clock of the events that they come back as."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import anyio

from holdfast.supervisor.timers import Timer

CHECK_S = 0.5  # wall clocks can be set: no sleep is longer than this without a look at the clock


class Timers:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: dict[Timer, float] = {}
        self._heap: list[tuple[float, Timer]] = []  # may hold replaced and cancelled ones
        self._news = anyio.Event()

    def set(self, timer: Timer, due: float) -> None:
        """A second one that is equal replaces the first."""
        self._due[timer] = due
        heapq.heappush(self._heap, (due, timer))
        self._news.set()

    def cancel(self, timer: Timer) -> None:
        self._due.pop(timer, None)

    def postpone(self, by_s: float) -> None:
        """All of them: this process did not run for so long, and what agents said meanwhile has not been read yet."""
        self._due = {timer: due + by_s for timer, due in self._due.items()}
        self._heap = [(due, timer) for timer, due in self._due.items()]
        heapq.heapify(self._heap)

    async def run(self, fire: Callable[[Timer], None]) -> None:
        """A loop for the term's task group: `fire(timer)` when it is due, in order."""
        while True:
            for timer in self._take_due():
                fire(timer)
            wait_s = self._heap[0][0] - self._clock() if self._heap else CHECK_S
            with anyio.move_on_after(min(max(wait_s, 0.0), CHECK_S)):
                await self._news.wait()
            self._news = anyio.Event()

    def _take_due(self) -> list[Timer]:
        due = []
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            at, timer = heapq.heappop(self._heap)
            if self._due.get(timer) == at:
                del self._due[timer]
                due.append(timer)
        return due
