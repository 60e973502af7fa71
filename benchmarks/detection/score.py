"""The result of a suite: counts, and the measures that follow from them."""

from __future__ import annotations

import math
import statistics
import sys
from dataclasses import dataclass, field
from typing import Any

_Z95 = 1.959964


def wilson95(hits: int, cases: int) -> tuple[float, float]:
    """The Wilson interval of a proportion at 95 %; (0, 1) if there are no cases."""
    if cases == 0:
        return 0.0, 1.0
    share, z2 = hits / cases, _Z95 * _Z95
    centre = (share + z2 / (2 * cases)) / (1 + z2 / cases)
    half = _Z95 / (1 + z2 / cases) * math.sqrt(share * (1 - share) / cases + z2 / (4 * cases * cases))
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(slots=True)
class Score:
    """Counts of one suite, or of one of its rows. `wrong`: false conclusions. `missed`: true conclusions not drawn."""

    suite: str
    unit: str = "s"  # of the delays
    hits: int = 0
    wrong: int = 0
    missed: int = 0
    clean: int = 0  # cases without an expected conclusion, in which none was drawn
    spoiled: int = 0  # cases without an expected conclusion, in which one was drawn
    delays: list[float] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)  # the first 20, for inspection
    rows: list[Score] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def hit(self, delay: float | None = None) -> None:
        self.hits += 1
        if delay is not None:
            self.delays.append(delay)

    def fail(self, what: str, *, wrong: int = 0, missed: int = 0, spoiled: bool = False) -> None:
        """Count a failed case. `spoiled`: no conclusion was expected."""
        self.wrong += wrong
        self.missed += missed
        self.spoiled += spoiled
        if len(self.mistakes) < 20:
            self.mistakes.append(what)

    def row(self, name: str) -> Score:
        """Add a row to this suite; `total` adds the row's counts to those of the suite."""
        part = Score(name, self.unit)
        self.rows.append(part)
        return part

    def total(self, *names: str) -> Score:
        """Add the counts of the named rows, or of all rows, to this suite."""
        for part in self.rows:
            if not names or part.suite in names:
                self.hits += part.hits
                self.wrong += part.wrong
                self.missed += part.missed
                self.clean += part.clean
                self.spoiled += part.spoiled
                self.delays += part.delays
                self.mistakes += part.mistakes
        del self.mistakes[20:]
        return self

    @property
    def cases(self) -> int:
        return self.hits + self.missed + self.clean + self.spoiled

    def as_json(self) -> dict[str, Any]:
        concluded = self.hits + self.wrong
        expected = self.hits + self.missed
        low, high = wilson95(self.hits, expected)
        result: dict[str, Any] = {
            "precision": self.hits / concluded if concluded else None,
            "recall": self.hits / expected if expected else None,
            "wilson95": [round(low, 4), round(high, 4)],
            "delay": delays_of(self.delays, self.unit),
            "cases": self.cases,
            "hits": self.hits,
            "wrong": self.wrong,
            "missed": self.missed,
            "clean": self.clean,
            "spoiled": self.spoiled,
        }
        if self.mistakes:
            result["mistakes"] = self.mistakes
        if self.facts:
            result["facts"] = self.facts
        if self.rows:
            result["rows"] = {part.suite: part.as_json() for part in self.rows}
        return result


def progress(text: str) -> None:
    """Print the progress of a long suite, separately from the table of results."""
    print(f"… {text}", file=sys.stderr, flush=True)


def delays_of(delays: list[float], unit: str) -> dict[str, Any] | None:
    if not delays:
        return None
    ordered = sorted(delays)
    return {
        "unit": unit,
        "p50": statistics.median(ordered),
        "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))],
        "max": ordered[-1],
    }
