"""Exponential back-off with jitter, so that a thousand agents that lost one supervisor do not reconnect at the same time."""

from __future__ import annotations

import random

import anyio


class Backoff:
    """Delays that grow from `first_s` to `max_s`, each drawn from the upper half of its range. `reset` after a success."""

    def __init__(
        self,
        *,
        first_s: float = 0.05,
        max_s: float = 5.0,
        factor: float = 2.0,
        chance: random.Random | None = None,
    ) -> None:
        if not 0 < first_s <= max_s or factor < 1:
            raise ValueError(f"0 < first_s ≤ max_s and factor ≥ 1, not {first_s}, {max_s}, {factor}")
        self._first_s = first_s
        self._max_s = max_s
        self._factor = factor
        self._chance = chance or random.Random()
        self._ceiling_s = first_s

    def next_s(self) -> float:
        """Return the seconds to wait before the next attempt."""
        ceiling_s = self._ceiling_s
        self._ceiling_s = min(ceiling_s * self._factor, self._max_s)
        return self._chance.uniform(ceiling_s / 2, ceiling_s)

    def reset(self) -> None:
        self._ceiling_s = self._first_s

    async def sleep(self) -> None:
        await anyio.sleep(self.next_s())
