"""Plans the faults of a soak. Pure: equal seeds give equal plans.

Every kind is used once before any kind is used again. Two trials of five have one fault; the others have two or three faults
shortly after each other, because only these show how the parts recover together. `alone` kinds (which stop all nodes, or the
control plane for a long time) are not mixed with others. The plan contains the duration of each fault.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

MIXED = (1, 1, 2, 2, 3)  # kinds in a trial, drawn from these
SPREAD_S = 1.5  # the faults of a trial are injected within this time
LONG_HOLD_S_MAX = 180.0
LONG_HOLD_SHARE = 0.12  # duration of one outage of the control plane, as a fraction of the soak


class Need(StrEnum):
    """The means that a kind needs; without them, the kind is skipped and listed in the report."""

    CLOCK = "a C compiler, for clocks that jump"
    MOUNT = "root, for a small file system of each node's own"
    NETWORK = "root, ip and /dev/net/tun, for a network of each node's own"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The permitted effects of a fault on the run, and the means that it needs."""

    name: str
    does: str  # description for the log
    leaves_alone: bool  # True: the run must continue in the same generation; False: it must step again
    hold_s: tuple[float, float] = (0.0, 0.0)  # range of its duration
    recover_s: float = 20.0  # limit until every rank steps again after its end, on a quiet machine
    aftermath_s: float = 2.0  # time in which late effects can occur
    alone: bool = False
    long: bool = False  # lasts for minutes in a long soak, see `longest_s`
    unfit: bool = False  # its node cannot work, so moving the ranks is correct
    keeps_near: bool = True  # shards on nodes survive it, if it affects only one node
    needs: Need | None = None


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault of one trial."""

    kind: str
    after_s: float  # from the beginning of the trial
    hold_s: float
    draw: int  # random number that selects its target among the running processes


@dataclass(frozen=True, slots=True)
class Trial:
    number: int
    strikes: tuple[Strike, ...]


def longest_s(minutes: float) -> float:
    """Return the longest outage of the control plane in a soak of `minutes`."""
    return min(LONG_HOLD_S_MAX, max(10.0, LONG_HOLD_SHARE * 60.0 * minutes))


def plan(seed: int, kinds: Mapping[str, Kind], minutes: float) -> Iterator[Trial]:
    """Yield trials without end. Raises ValueError if there are no kinds."""
    if not kinds:
        raise ValueError("no kind of fault is possible")
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
    """Return all kinds in a new order; kinds in `after` come last, so that no kind is in one trial twice."""
    order = chance.sample(list(names), len(names))
    return sorted(order, key=lambda name: name in after)


def _together(waiting: list[str], kinds: Mapping[str, Kind], count: int) -> list[str]:
    """Take the next kind out of `waiting`, with up to `count` - 1 kinds that may be mixed with it."""
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
