"""Which faults strike when. Pure: a seed gives the same plan for ever.

Every kind is struck once before any is struck again. Two trials of five are of one kind, the others of two or three at once, a
moment apart: how the parts recover together is what single faults cannot show. `alone` kinds (which take everything
down, or the control plane for long) are not mixed with others, and the plan says for how long each fault lasts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

MIXED = (1, 1, 2, 2, 3)  # kinds in a trial, drawn from these
SPREAD_S = 1.5  # within a trial, faults strike within so long of each other
LONG_HOLD_S_MAX = 180.0
LONG_HOLD_SHARE = 0.12  # of the whole soak, for one absence of the control plane


class Need(StrEnum):
    """What a kind needs of the machine; without it the kind is skipped and the report says so."""

    CLOCK = "a C compiler, for clocks that jump"
    MOUNT = "root, for a small file system of each node's own"
    NETWORK = "root, ip and /dev/net/tun, for a network of each node's own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What a fault may do to the run, and what it needs."""

    name: str
    does: str  # in words, for the log
    leaves_alone: bool  # the run must go on in the same generation; else it must step again
    hold_s: tuple[float, float] = (0.0, 0.0)  # how long it lasts, drawn from this range
    recover_s: float = 20.0  # after its end, on a quiet machine, until every rank steps again
    aftermath_s: float = 2.0  # its late effects show within this
    alone: bool = False
    long: bool = False  # lasts for minutes in a long soak, see `longest_s`
    unfit: bool = False  # its node cannot work: to take the ranks away is right
    keeps_near: bool = True  # what nodes hold survives it, if it strikes one node
    needs: Need | None = None


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault of one trial."""

    kind: str
    after_s: float  # from the trial's begin
    hold_s: float
    draw: int  # decides whom it strikes, by whatever runs then


@dataclass(frozen=True, slots=True)
class Trial:
    number: int
    strikes: tuple[Strike, ...]


def longest_s(minutes: float) -> float:
    """How long the control plane is absent, at most, in a soak of `minutes`."""
    return min(LONG_HOLD_S_MAX, max(10.0, LONG_HOLD_SHARE * 60.0 * minutes))


def plan(seed: int, kinds: Mapping[str, Kind], minutes: float) -> Iterator[Trial]:
    """Trials without end. Raises ValueError when there is nothing to strike with."""
    if not kinds:
        raise ValueError("no kind of fault is left to strike with")
    chance = random.Random(seed)
    waiting: list[str] = []
    number = 0
    while True:
        number += 1
        while len(waiting) < max(MIXED):
            waiting += _round(chance, list(kinds), after=waiting)
        chosen = _together(waiting, kinds, chance.choice(MIXED))
        strikes = tuple(_strike(chance, kinds[name], minutes, first=not index) for index, name in enumerate(chosen))
        yield Trial(number, strikes)


def _round(chance: random.Random, names: Sequence[str], *, after: Sequence[str]) -> list[str]:
    """All of them in a new order; those that still wait come last, so that none is in one trial twice."""
    order = chance.sample(list(names), len(names))
    return sorted(order, key=lambda name: name in after)


def _together(waiting: list[str], kinds: Mapping[str, Kind], count: int) -> list[str]:
    """Takes the next out of `waiting`, with as many that may be mixed with it as are asked for."""
    chosen = [waiting.pop(0)]
    if kinds[chosen[0]].alone:
        return chosen
    for name in list(waiting):
        if len(chosen) == count:
            break
        if not kinds[name].alone and name not in chosen:
            waiting.remove(name)
            chosen.append(name)
    return chosen


def _strike(chance: random.Random, kind: Kind, minutes: float, *, first: bool) -> Strike:
    least, most = kind.hold_s
    if kind.long:
        most = longest_s(minutes)
        least = most / 2
    after_s = 0.0 if first else round(chance.uniform(0.0, SPREAD_S), 3)
    return Strike(kind.name, after_s, round(chance.uniform(least, most), 3), chance.randrange(1 << 30))
