"""The measured values, the goals, and the table."""

from __future__ import annotations

import json
import os
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Measured = list[tuple[str, str, float]]  # (measure, contender, value)

OURS = "holdfast"
MEASURES = (
    "stall_s",
    "durable_s",
    "slowdown_median",
    "slowdown_mean",
    "slowdown_p99",
    "restore_local_gb_s",
    "replicate_gb_s",
    "replicate_by_default_gb_s",
    "replicate_to_disk_gb_s",
    "restore_peer_gb_s",
    "store_up_gb_s",
    "store_down_gb_s",
    "peak_extra_bytes",
    "save_cpu_ms",
)
# Measure → the contenders that are its limit; the first one that was measured is used.
LIMITS = {
    "stall_s": ("copy",),
    "restore_local_gb_s": ("copy",),
    "replicate_gb_s": ("iperf3", "socket"),
    "restore_peer_gb_s": ("iperf3", "socket"),
    "store_up_gb_s": ("ceiling",),
    "store_down_gb_s": ("ceiling_parallel",),
    "peak_extra_bytes": ("state",),
}


class TrialFailed(Exception):
    """This trial has no values; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Holdfast's median must be ≤ (for a rate: ≥) `factor` × the median of the first of `against` that was measured. If
    `against` is empty, `factor` is the limit itself."""

    measure: str
    factor: float
    against: tuple[str, ...] = ()
    contender: str = OURS

    @property
    def at_least(self) -> bool:
        return self.measure.endswith("_gb_s")

    def __str__(self) -> str:
        sign = "≥" if self.at_least else "≤"
        return f"{sign} {self.factor:.3g}" + (f" × {' or '.join(self.against)}" if self.against else "")


GOALS = (
    Goal("stall_s", 1.15, ("copy",)),
    Goal("stall_s", 0.9, ("dcp_async_cached",)),
    Goal("durable_s", 1 / 3, ("dcp_async",)),
    Goal("durable_s", 1 / 3, ("dcp_async_cached",)),
    Goal("slowdown_median", 1.10),
    Goal("slowdown_p99", 1.5),
    Goal("slowdown_median", 1.10, contender="holdfast_peer"),
    Goal("slowdown_p99", 1.5, contender="holdfast_peer"),
    Goal("restore_local_gb_s", 0.7, ("copy",)),
    Goal("replicate_gb_s", 0.9, ("iperf3", "socket")),
    Goal("restore_peer_gb_s", 0.8, ("iperf3", "socket")),
    Goal("replicate_gb_s", 0.7, ("unprotected",), contender="digests_tls"),
    Goal("replicate_by_default_gb_s", 0.7, ("unprotected",), contender="digests_tls"),
    Goal("restore_peer_gb_s", 0.7, ("unprotected",), contender="digests_tls"),
    Goal("store_up_gb_s", 0.9, ("ceiling",)),
    Goal("store_down_gb_s", 0.9, ("ceiling_parallel",)),
    Goal("peak_extra_bytes", 2.1, ("state",)),  # two slots, and the processes' own
)


@dataclass(slots=True)
class Results:
    values: dict[str, dict[str, list[float]]] = field(default_factory=lambda: {name: {} for name in MEASURES})
    failed: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # trials by contender
    about: dict[str, Any] = field(default_factory=dict)

    def add(self, measured: Measured) -> None:
        for measure, contender, value in measured:
            self.values[measure].setdefault(contender, []).append(value)

    def write(self, path: Path) -> None:
        """Write `{measure: {contender: [value per trial]}}`, with the additional keys `failed_trials` and `about`."""
        record = {**self.values, "failed_trials": dict(self.failed), "about": self.about}
        path.write_text(json.dumps(record, indent=2) + "\n")

    # ------------------------------------------------------------ the table

    def print(self) -> None:
        print(
            f"\n{'measure':26}{'contender':22}{'min':>9}{'median':>9}{'max':>9}{'n':>4}{'÷ limit':>9}{'÷ holdfast':>12}"
        )
        for measure, contenders in self.values.items():
            for contender, values in contenders.items():
                print(self._row(measure, contender, values))
        print("\ngoals (medians)")
        for goal in GOALS:
            if (line := self._goal(goal)) is not None:
                print(line)
        if self.failed:
            print(f"\nfailed trials: {dict(self.failed)}")
        load = " ".join(f"{value:.1f}" for value in os.getloadavg())
        print(
            f"\n{os.cpu_count()} cores, load {load}; " + "; ".join(f"{name}: {is_}" for name, is_ in self.about.items())
        )

    def median(self, measure: str, *contenders: str) -> float | None:
        """Return the median of the first of these contenders that has values."""
        for contender in contenders:
            if values := self.values[measure].get(contender):
                return statistics.median(values)
        return None

    def _row(self, measure: str, contender: str, values: list[float]) -> str:
        middle = statistics.median(values)
        numbers = "".join(f"{_short(measure, value):>9}" for value in (min(values), middle, max(values)))
        ratios = "".join(
            f"{middle / base:{width}.2f}" if base else " " * width
            for width, base in (
                (9, self.median(measure, *LIMITS.get(measure, ()))),
                (12, self.median(measure, OURS)),
            )
        )
        return f"{measure:26}{contender:22}{numbers}{len(values):4}{ratios}"

    def _goal(self, goal: Goal) -> str | None:
        """Return the line of a goal; None if its contenders were not measured."""
        ours = self.median(goal.measure, goal.contender)
        base = self.median(goal.measure, *goal.against) if goal.against else 1.0
        if ours is None or base is None:
            return None
        factor = ours / base
        reached = factor >= goal.factor if goal.at_least else factor <= goal.factor
        return (
            f"  {'reached' if reached else 'MISSED':8} {goal.measure:26}{goal.contender:15}{factor:7.3g}   goal {goal}"
        )


def _short(measure: str, value: float) -> str:
    return f"{value / 1e9:.2f} GB" if measure.endswith("_bytes") else f"{value:.3f}"
