"""Maintenance in a simulation: a notice announces that a machine will be taken away, which then happens or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

ANNOUNCED_S = (1.0, 30.0)
ANNOUNCEMENTS_MAX = 3


@dataclass(frozen=True, slots=True)
class Maintenance:
    """One maintenance notice. Nine of ten seeds have none, and give the same runs as before notices were added."""

    node: int  # index of the node, modulo the number of nodes
    announced_s: float
    starts_s: float | None  # announced start, after the notice; None = not announced
    taken_s: float | None  # actual start, after the notice; None = the notice is withdrawn
    over_s: float  # the end, after the notice or after the actual start

    @classmethod
    def of(cls, seed: int) -> tuple[Maintenance, ...]:
        if seed % 10 != 6:
            return ()
        chance = Random(f"maintenance of {seed}")
        return tuple(cls._drawn(chance) for _ in range(chance.randint(1, ANNOUNCEMENTS_MAX)))

    @classmethod
    def _drawn(cls, chance: Random) -> Maintenance:
        starts_s = chance.choice((None, chance.uniform(1.0, 90.0)))
        really_s = chance.uniform(2.0, 40.0) if starts_s is None else starts_s + chance.uniform(0.0, 5.0)
        taken_s = really_s if chance.random() < 0.5 else None
        return cls(chance.randint(0, 99), chance.uniform(*ANNOUNCED_S), starts_s, taken_s, chance.uniform(0.5, 60.0))

    @classmethod
    def of_agents(cls, seed: int) -> tuple[Maintenance, ...]:
        """Return agents that get SIGTERM, several at once as at the end of an allocation. `taken_s` is the end of their grace
        period."""
        if seed % 10 != 8:
            return ()
        chance = Random(f"agents asked to end in {seed}")
        at_s, grace_s = chance.uniform(*ANNOUNCED_S), chance.uniform(3.0, 30.0)
        first = chance.randint(0, 99)
        return tuple(
            cls(first + each, at_s + chance.uniform(0.0, 0.8), grace_s, grace_s, chance.uniform(0.5, 20.0))
            for each in range(chance.choice((1, 1, 2, 99)))
        )

    def evidence(self, now: float) -> dict[str, str]:
        starts = {} if self.starts_s is None else {"starts_at": f"{now + self.starts_s:.0f}"}
        return {"source": "file", "event": "reboot", **starts}

    def play(
        self, after: Callable[[float, Callable[[], None]], None], take: Callable[[], None], over: Callable[[], None]
    ) -> None:
        """Schedule the events that follow the notice."""
        if self.taken_s is None:
            after(self.over_s, over)
        else:
            after(self.taken_s, take)
            after(self.taken_s + self.over_s, over)
