"""The kinds of simulated worlds: each has its own seeds, and a share of those of a campaign through all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.sim.allocations import ALLOCATIONS_FROM
from holdfast.sim.scenario import ANY_ORDER_FROM, IDLE_LINKS_FROM, SEVERAL_JOBS_FROM


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    first: int  # its first seed
    every: int = 1  # a campaign simulates one seed of this kind for so many of the first kind

    def seeds(self, first: int, count: int) -> range:
        """The seeds of this kind in a campaign. Campaigns that follow each other have no seed in common."""
        return range(self.first + first // self.every, self.first + (first + count) // self.every)


# The shares are smaller where a seed takes longer.
ONE_JOB = Kind("one job", 0)
ANY_ORDER = Kind("meshes in any order", ANY_ORDER_FROM, 10)
ALLOCATIONS = Kind("allocations that end", ALLOCATIONS_FROM, 30)
SEVERAL_JOBS = Kind("several jobs", SEVERAL_JOBS_FROM, 50)
IDLE_LINKS = Kind("idle nodes that test their network", IDLE_LINKS_FROM, 150)
KINDS = (ONE_JOB, ANY_ORDER, ALLOCATIONS, SEVERAL_JOBS, IDLE_LINKS)

SEEDS_END = ANY_ORDER_FROM  # of a campaign through all worlds


def of_all_kinds(first: int, count: int) -> Sequence[int]:
    """The seeds of a campaign through all worlds. Those that take long come first, so that no process has them at the end."""
    return [seed for kind in reversed(KINDS) for seed in kind.seeds(first, count)]
