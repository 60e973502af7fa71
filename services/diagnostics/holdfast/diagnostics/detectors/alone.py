"""Runs one detector without the engine, for tests and benchmarks: its state, its roster, and its unmodified findings."""

from __future__ import annotations

from typing import Generic

from holdfast.diagnostics.detectors.protocol import Detector, Observed, State
from holdfast.diagnostics.roster import Roster
from holdfast.domain.findings import Finding


class Alone(Generic[State]):
    """Folds items into `detector` and the roster that it reads."""

    def __init__(self, detector: Detector[State]) -> None:
        self.detector = detector
        self.roster = Roster()
        self.state = detector.initial()

    def observe(self, item: Observed, now: float) -> tuple[Finding, ...]:
        """Fold `item` at `now` (diagnostics' clock, Unix seconds). Only the engine recognises a new run; callers of this method
        pass `RunStarted` instead."""
        self.roster.observe(item)
        self.state, findings = self.detector.observe(self.state, item, now, self.roster)
        return findings
