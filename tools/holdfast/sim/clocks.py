"""Clocks of simulated processes. Each is its own: set wrong from the beginning, or set anew while everything runs."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.sim.world import World


@dataclass(slots=True)
class Clock:
    """A wall clock, in Unix seconds as its process reads them."""

    world: World
    ahead_s: float = 0.0  # of the world's time

    def now(self) -> float:
        return self.world.now + self.ahead_s

    def set(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s
