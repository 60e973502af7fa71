"""GPU resets in a simulation: when a reset is found to be necessary, which agents can reset, and the outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

FAULTS_MAX = 3
FAILED = "the command that resets GPUs failed"


@dataclass(slots=True)
class Resets:
    """The resets of one seed. None by default: three of four seeds give the same runs as before resets were added."""

    faults: int = 0
    unable: float = 0.0  # fraction of agents without a command
    chance: Random = field(default_factory=Random, compare=False)
    fail: bool = True
    later: Random | None = None  # whether a reset can wait for the job's next boundary; None = it never can

    @classmethod
    def of(cls, seed: int) -> Resets:
        if seed % 4 != 3:
            return cls()
        chance = Random(f"resets of {seed}")
        later = Random(f"resets of {seed} that can wait") if seed % 8 == 7 else None
        return cls(chance.randint(1, FAULTS_MAX), chance.choice((0.0, 0.0, 0.3)), chance, later=later)

    def can_wait(self) -> bool:
        return self.later is not None and self.later.random() < 0.6

    def calm(self) -> None:
        """Let no reset fail from now on."""
        self.fail = False

    def outcome(self) -> tuple[float, str]:
        """Return the duration of a reset, in seconds, and the reason of its failure; empty = success. Some end after the
        supervisor's timeout."""
        drawn = self.chance.random() if self.fail else 0.0
        if drawn < 0.65:
            return self.chance.uniform(0.5, 20.0), ""
        if drawn < 0.85:
            return self.chance.uniform(0.5, 20.0), FAILED
        return (self.chance.uniform(90.0, 95.0), FAILED) if drawn < 0.95 else (self.chance.uniform(250.0, 300.0), "")
