"""What a detector is: a pure fold from what was observed to findings.

A new detector is one file here and one line in `detectors/__init__.py`. Its rules:

* `observe` depends on its arguments only. `now` is diagnostics' clock, Unix seconds, when the item was folded. `item.at` is
  the agent's clock: it is trusted for order and for reports, never for deadlines.
* `roster` contains the newest generation of each job, the nodes of its ranks, and the nodes that have stopped. Detectors read
  it and never change it.
* State is used linearly: `observe` may reuse the tables of the state that it was given, so the caller keeps only the state
  that was returned. (Copying a table of 12,500 nodes for each heartbeat would cost more than everything else together.)
* Silence is concluded from `ClockTick`, and only about what this process has itself observed: unknown never means faulty.
* Work per item depends on what has changed, not on the number of nodes or ranks of the job.
* Every table is `Bounded`. A finding's id is stable for one physical fault, so that a fault found twice is reported once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

from holdfast.diagnostics.roster import Roster, RunStarted
from holdfast.domain.findings import Finding, StepRecord
from holdfast.domain.signals import Signal


@dataclass(frozen=True, slots=True)
class TelemetryGap:
    """This process did not run for `gap_s`, or its clock was set: silence until `at` proves nothing."""

    at: float
    gap_s: float


Findings = tuple[Finding, ...]
# Findings are fed back to the detectors that read them: a lost node explains the collective errors of other nodes.
Observed = Signal | StepRecord | Finding | TelemetryGap | RunStarted

State = TypeVar("State")


class Detector(Protocol[State]):
    """One kind of conclusion. Configuration is in the detector's fields, memory is in `State`."""

    @property
    def reads(self) -> tuple[type[Observed], ...]:
        """The types that the engine routes to `observe`."""

    def initial(self) -> State:
        """The state before the first item."""

    def observe(self, state: State, item: Observed, now: float, roster: Roster) -> tuple[State, Findings]:
        """Fold one item, which `roster` has folded already. Returns the state to keep and the new findings."""
