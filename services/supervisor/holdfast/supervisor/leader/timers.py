"""The core's timers. A timer can be replaced; its due time is by the clock of the events."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import anyio

from holdfast.supervisor.timers import Timer

CHECK_S = 0.5  # wall clocks can be set, so the clock is read at least this often


class Timers:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due: dict[Timer, float] = {}
        self._heap: list[tuple[float, Timer]] = []  # may contain replaced and cancelled timers
        self._wake = anyio.Event()

    def set(self, timer: Timer, due: float) -> None:
        """Set a timer. It replaces an equal one."""
        self._due[timer] = due
        heapq.heappush(self._heap, (due, timer))
        self._wake.set()

    def cancel(self, timer: Timer) -> None:
        self._due.pop(timer, None)

    def postpone(self, by_s: float) -> None:
        """Postpone all timers: this process was frozen for `by_s`, and has not read the reports of that time yet."""
        self._due = {timer: due + by_s for timer, due in self._due.items()}
        self._heap = [(due, timer) for timer, due in self._due.items()]
        heapq.heapify(self._heap)

    async def run(self, fire: Callable[[Timer], None]) -> None:
        """A loop for the term's task group: calls `fire(timer)` for due timers, in order."""
        while True:
            for timer in self._take_due():
                fire(timer)
            wait_s = self._heap[0][0] - self._clock() if self._heap else CHECK_S
            with anyio.move_on_after(min(max(wait_s, 0.0), CHECK_S)):
                await self._wake.wait()
            self._wake = anyio.Event()

    def _take_due(self) -> list[Timer]:
        due = []
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            at, timer = heapq.heappop(self._heap)
            if self._due.get(timer) == at:
                del self._due[timer]
                due.append(timer)
        return due
