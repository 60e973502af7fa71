"""The protocol of detectors: a detector is a pure fold from observed items to findings.

A new detector is one file here and one line in `detectors/__init__.py`. Rules:

* `observe` depends on its arguments only. `now` is the time at which the item was folded (diagnostics' clock, Unix seconds).
  `item.at` is a time of the agent's clock: use it for order and for reports, never for deadlines.
* `roster` contains the newest generation of each job, the nodes of its ranks, and the nodes that have stopped. Detectors read
  the roster and never change it.
* State is used linearly: `observe` may reuse the tables of the state that it was given, so the caller keeps only the returned
  state. (Copying a table of 12,500 nodes for each heartbeat would cost more than everything else together.)
* Conclusions from silence are drawn at `ClockTick`, and only about nodes and ranks that this process has itself observed:
  unknown never means faulty.
* Work per item depends on what has changed, not on the number of nodes or ranks of the job.
* Every table is `Bounded`. One physical fault has one finding id, so that a fault that is detected twice is reported once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from holdfast.diagnostics.roster import Roster, RunStarted
from holdfast.domain.findings import Finding, StepRecord
from holdfast.domain.signals import Signal


@dataclass(frozen=True, slots=True)
class TelemetryGap:
    """This process did not run for `gap_s`, or its clock was set. Silence until `at` therefore proves nothing."""

    at: float
    gap_s: float


Findings = tuple[Finding, ...]
# Detectors can read the findings of other detectors: a lost node explains the collective errors of other nodes.
Observed = Signal | StepRecord | Finding | TelemetryGap | RunStarted

State = TypeVar("State")


class Detector(Protocol[State]):
    """A detector. Its fields contain the configuration, `State` contains what it has observed. `reads` and `initial` may be
    class variables: a tuple, and the class of the state."""

    @property
    def reads(self) -> tuple[type[Observed], ...]:
        """The types that the engine routes to `observe`."""

    def initial(self) -> State:
        """The state before the first item."""

    def observe(self, state: State, item: Observed, now: float, roster: Roster) -> tuple[State, Findings]:
        """Fold one item; `roster` has already folded the same item. Returns the state to keep and the new findings."""
