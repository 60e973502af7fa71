"""Maintenance in a simulation: a machine is announced to be taken, and then it is taken, or it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

ANNOUNCED_S = (1.0, 30.0)
ANNOUNCEMENTS_MAX = 3


@dataclass(frozen=True, slots=True)
class Maintenance:
    """One announcement. Nine of ten seeds replay as they did before anything was announced."""

    node: int  # the how-manieth
    announced_s: float
    starts_s: float | None  # after it; None = nobody says when
    taken_s: float | None  # after it; None = it is withdrawn
    over_s: float  # after it was announced, or after the machine was taken

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
        """Agents that are told to end, several at once as when an allocation ends: `taken_s` is the end of their grace."""
        if seed % 10 != 8:
            return ()
        chance = Random(f"agents told to end in {seed}")
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
        """From the announcement on."""
        if self.taken_s is None:
            after(self.over_s, over)
        else:
            after(self.taken_s, take)
            after(self.taken_s + self.over_s, over)
