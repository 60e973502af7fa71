"""The checkpoint interval of a run, which orders change."""

from __future__ import annotations

INTERVALS_MAX = 8  # pending changes of the interval


class Intervals:
    """The checkpoint interval by step. An order changes it from a future step that no rank has reached yet."""

    def __init__(self, interval_steps: int) -> None:
        self._plan = [(0, interval_steps)]  # (from step, interval), by step

    def change(self, from_step: int, interval_steps: int) -> None:
        kept = [entry for entry in self._plan if entry[0] < from_step]
        self._plan = [*kept[-INTERVALS_MAX:], (from_step, interval_steps)]

    def due(self, step: int) -> bool:
        interval = next((interval for start, interval in reversed(self._plan) if start <= step), 0)
        return interval > 0 and step % interval == 0
