"""Judges tests of the network between two nodes. Pure.

A slow path has two ends and a network between them. So no test is judged by itself:

* *Slow* follows from the fleet's own results: less than half of the median of similar pairs, and further from it than
  `SPREAD_MAX` times their spread. The spread is the median absolute deviation of logarithms, because speeds vary by factors.
  Bad results move neither, as long as they are fewer than half. A node's own results are excluded from its comparison. While
  there are too few results, a test is not judged.
* *Blame* follows from partners. A node is blamed if its newest tests are bad with two different partners, each of which was
  good with another node after that: an earlier good test says nothing if several nodes fail at once. If the node has several
  neighbours in its zone, both partners must be neighbours (with a single one, it must be one of them), because the network
  between the zones may be slow. Tests from before the node last had ranks do not count.
* *Mended* is a node whose two newest tests since then were good.

Similar pairs have the same numbers of workers, and are equally within a zone or between zones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp, log
from statistics import median

from holdfast.domain.links import LinkMeasured

KEPT_MAX = 8  # tests that are kept of a node
RESULTS_MIN = 3  # tests of other nodes, before a test is judged
OTHERS_MIN = 3  # nodes besides the blamed one: with only two, the tests would be as much evidence against these
SAMPLE_MAX = 200  # other nodes whose tests are used for comparison
WINDOW = 12  # times the interval between tests: older results are not used for comparison
BLAMES_MIN = 2  # partners
GOOD_MIN = 2  # tests in a row

SLOW_SHARE = 0.5  # of the median
# In a normal distribution, 1 value in 10,000 is further below the median than 3.7 standard deviations, which are 5.5 times the
# median absolute deviation. A network with other users spreads more, so fewer of its results are judged as bad.
SPREAD_MAX = 5.5
# The machine may delay the processes that measure a round trip. So the shortest of several is used, and only much longer ones
# count.
LONG_TIMES = 5.0
LONG_S_MIN = 0.002
_LEAST = 1e-9  # no measurement is zero


class Verdict(StrEnum):
    GOOD = "good"
    SLOW = "slow"
    FAILED = "failed"  # partner not reached, or data arrived corrupted
    UNJUDGED = "unjudged"  # measured, but with too few results to compare it with


@dataclass(frozen=True, slots=True)
class Expected:
    """The results of similar pairs of other nodes at the time a test was judged."""

    bytes_per_s: float  # median, in the slower direction
    bytes_per_s_min: float  # less is slow
    round_trip_s: float  # median
    round_trip_s_max: float  # more is slow
    results: int


@dataclass(frozen=True, slots=True)
class LinkTest:
    """One test, as seen by one of its two nodes."""

    at: float  # Unix seconds
    partner: str
    similar: str  # pairs with the same text are compared
    in_zone: bool
    measured: LinkMeasured
    verdict: Verdict = Verdict.UNJUDGED
    expected: Expected | None = None

    @property
    def bad(self) -> bool:
        return self.verdict in (Verdict.SLOW, Verdict.FAILED)

    @property
    def bytes_per_s(self) -> float:
        """In the slower direction."""
        return min(self.measured.out_bytes_per_s, self.measured.in_bytes_per_s)


Rows = Mapping[str, Sequence[LinkTest]]  # by node, oldest first; each test is in the rows of both nodes


@dataclass(frozen=True, slots=True)
class Blame:
    cause: str  # states the measured and expected values, and the partners
    tests: tuple[LinkTest, ...]  # of the two partners, oldest first
    expected: Expected | None  # None: no finished test was judged

    @property
    def failed(self) -> bool:
        return any(test.verdict is Verdict.FAILED for test in self.tests)


# ---------------------------------------------------------------- one test


def mirrored(measured: LinkMeasured) -> LinkMeasured:
    """The same test as seen by the other node."""
    return LinkMeasured(measured.in_bytes_per_s, measured.out_bytes_per_s, measured.round_trip_s, measured.failure)


def expected(name: str, similar: str, rows: Rows, since: float) -> Expected | None:
    """The results that this node should reach; None while too little is known."""
    seen: dict[tuple[str, str, float], LinkTest] = {}
    for node, tests in list(rows.items())[:SAMPLE_MAX]:
        for test in tests:
            if (
                test.at >= since
                and test.similar == similar
                and name not in (node, test.partner)
                and not test.measured.failure
            ):
                first, second = sorted((node, test.partner))
                seen[first, second, test.at] = test
    if len(seen) < RESULTS_MIN:
        return None
    rate, rate_factor = _spread([test.bytes_per_s for test in seen.values()])
    trip, trip_factor = _spread([test.measured.round_trip_s for test in seen.values()])
    return Expected(
        bytes_per_s=rate,
        bytes_per_s_min=rate * min(SLOW_SHARE, 1 / rate_factor),
        round_trip_s=trip,
        round_trip_s_max=max(trip * max(LONG_TIMES, trip_factor), trip + LONG_S_MIN),
        results=len(seen),
    )


def _spread(values: Sequence[float]) -> tuple[float, float]:
    """(median, the factor within which values are usual)."""
    logarithms = [log(max(value, _LEAST)) for value in values]
    middle = median(logarithms)
    return exp(middle), exp(min(SPREAD_MAX * median(abs(each - middle) for each in logarithms), 100.0))


def verdict(test: LinkTest, than: Expected | None) -> Verdict:
    if test.measured.failure:
        return Verdict.FAILED
    if than is None:
        return Verdict.UNJUDGED
    return Verdict.GOOD if _reaches(test, than) else Verdict.SLOW


def _reaches(test: LinkTest, than: Expected) -> bool:
    return test.bytes_per_s >= than.bytes_per_s_min and test.measured.round_trip_s <= than.round_trip_s_max


def added(tests: Sequence[LinkTest], test: LinkTest) -> tuple[LinkTest, ...]:
    return (*tests, test)[-KEPT_MAX:]


# ---------------------------------------------------------------- several


def blame(name: str, rows: Rows, neighbours: Sequence[str], since: float, own_since: float) -> Blame | None:
    """The blame for the node's newest tests, those since `own_since`, if it is to blame. `neighbours`: other nodes of its zone
    that could test with it."""
    run: list[LinkTest] = []
    for test in reversed(rows.get(name, ())):
        if not test.bad or test.at < own_since:
            break
        run.append(test)
    witnesses: dict[str, LinkTest] = {}  # partner → its newest test
    for test in run:
        if test.partner not in witnesses and _is_good_with_others(test.partner, name, rows, test.at):
            witnesses[test.partner] = test
    if len(neighbours) >= BLAMES_MIN:
        witnesses = {partner: test for partner, test in witnesses.items() if test.in_zone}
    others = sum(any(test.at >= since for test in tests) for node, tests in rows.items() if node != name)
    if len(witnesses) < BLAMES_MIN or others < OTHERS_MIN:
        return None
    if neighbours and not any(test.in_zone for test in witnesses.values()):
        return None
    tests = tuple(sorted(witnesses.values(), key=lambda test: test.at))
    than = next((test.expected for test in reversed(tests) if test.expected is not None), None)
    details = "; ".join(f"{partner}: {_described(test)}" for partner, test in sorted(witnesses.items()))
    what = "fails" if any(test.verdict is Verdict.FAILED for test in tests) else "is slow"
    return Blame(f"its network {what} with {len(tests)} nodes that are well with others ({details})", tests, than)


def _is_good_with_others(partner: str, name: str, rows: Rows, since: float) -> bool:
    """Whether the partner's newest judged test with another node, after `since`, was good."""
    judged = (
        test
        for test in reversed(rows.get(partner, ()))
        if test.partner != name and test.at > since and test.verdict is not Verdict.UNJUDGED
    )
    newest = next(judged, None)
    return newest is not None and newest.verdict is Verdict.GOOD


def is_mended(tests: Sequence[LinkTest], since: float, than: Expected | None) -> bool:
    """Whether the newest tests since `since` were good, compared with other nodes now or at the time of the blame."""
    newest = [test for test in tests if test.at > since][-GOOD_MIN:]
    return len(newest) == GOOD_MIN and all(_is_well(test, than) for test in newest)


def _is_well(test: LinkTest, than: Expected | None) -> bool:
    if test.verdict is Verdict.UNJUDGED:
        return than is not None and _reaches(test, than)
    return test.verdict is Verdict.GOOD


# ---------------------------------------------------------------- descriptions


def _described(test: LinkTest) -> str:
    measured, than = test.measured, test.expected
    if measured.failure:
        return measured.failure
    text = f"{rate(test.bytes_per_s)}, {trip(measured.round_trip_s)}"
    return text if than is None else f"{text}, where {rate(than.bytes_per_s)}, {trip(than.round_trip_s)} are usual"


def rate(bytes_per_s: float) -> str:
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}"
    return f"{bytes_per_s:.0f} B/s"


def trip(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms"
