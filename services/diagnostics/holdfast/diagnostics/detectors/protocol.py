"""What a detector is: a pure fold from what was observed to findings.

A new detector is one file here and one line in `detectors/__init__.py`. Its rules:

* `observe` depends on its arguments only. Time is `now`, diagnostics' clock in Unix seconds when the item was folded;
  `item.at` is the agent's clock and is trusted for order and for reports, never for deadlines.
* State is used linearly: `observe` may reuse the tables of the state that it was given, so the caller keeps only the state
  that was returned. (Copying a table of 12,500 nodes for each beat would cost more than everything else together.)
* Silence is concluded from `ClockTick`, and only about what this process has itself seen: unknown never means faulty.
* Every table is bounded; an id is stable for one physical fault, so that finding it twice is finding it once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from holdfast.domain.findings import Finding, StepRecord
from holdfast.domain.signals import Signal


@dataclass(frozen=True, slots=True)
class Blind:
    """diagnostics itself did not look for a while, or its clock was set: silence until `at` proves nothing."""

    at: float
    gap_s: float


@dataclass(frozen=True, slots=True)
class JobBegan:
    """A job of a name that is already known starts again at a low generation: what was remembered of it is history."""

    job: str


# Findings come back to the detectors that read them: a lost node explains the collective errors of its peers.
Observed = Signal | StepRecord | Finding | Blind | JobBegan

State = TypeVar("State")


class Detector(Protocol[State]):
    """One kind of conclusion. Configuration is in the detector's fields, memory is in `State`."""

    @property
    def reads(self) -> tuple[type[Observed], ...]:
        """The types that `observe` wants; everything else is not routed to it."""

    def initial(self) -> State:
        """The state of a process that has seen nothing."""

    def observe(self, state: State, item: Observed, now: float) -> tuple[State, tuple[Finding, ...]]:
        """Fold one item; `now` is diagnostics' clock, Unix seconds."""
