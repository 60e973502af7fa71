"""Clocks of simulated processes. Each can be wrong from the beginning, and can be set during the run."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.sim.world import World


@dataclass(slots=True)
class Clock:
    """A wall clock, in Unix seconds as its process reads them."""

    world: World
    ahead_s: float = 0.0  # offset to the world's time

    def now(self) -> float:
        return self.world.now + self.ahead_s

    def set(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s
