"""The promise about the leader's time: it passes as time passes, whoever leads, and whatever is done to clocks.

Notices, holds, probation, deadlines and timers of the state are times of this clock. If it went on by an hour at a takeover,
all of them would expire.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from holdfast.runtime.steady_clock import DRIFT_MAX
from holdfast.sim.clocks import Clock
from holdfast.sim.world import Violation, World
from holdfast.supervisor.core import State
from holdfast.supervisor.protocol import Event, LeaderStarted

SLACK_S = 0.01
RENEWED_S = 1.0  # after this time in the lead, a leader has recorded its time


@dataclass(slots=True)
class LeaderTime:
    world: World
    log_clock: Clock
    at: float | None = None  # the leader's time at the last fold; None = no leader before this one is known
    world_at: float = 0.0  # the world's time at the last fold
    began_at: float = 0.0  # the world's time at which the leader began
    log_ahead_s: float = 0.0  # of the log's clock at the last fold
    # Time without a leader that the present leader has not counted. It leads for too short a time to record its own time: the
    # next one may still count that time.
    uncounted_s: float = 0.0

    def folded(self, state: State, event: Event) -> None:
        """`state`: before the event."""
        before, self.at = self.at, event.at
        real_s, self.world_at = self.world.now - self.world_at, self.world.now
        log_was_set, self.log_ahead_s = self.log_clock.ahead_s != self.log_ahead_s, self.log_clock.ahead_s
        began = isinstance(event, LeaderStarted)
        if began:
            self.began_at = self.world.now
        elif self.world.now > self.began_at + RENEWED_S:
            self.uncounted_s = 0.0
        if before is None:
            return
        passed_s = event.at - before
        # Of a pause without a leader there are two measures: the log's clock, and the new leader's. If the log's was set during
        # the pause, the other one counts, which may be wrong, too.
        measurable = not (began and log_was_set)
        # since the last record, the time may have drifted
        slack_s = SLACK_S + (RENEWED_S * DRIFT_MAX if began else 0.0)
        if measurable and passed_s > (real_s + self.uncounted_s) * (1 + DRIFT_MAX) + slack_s:
            raise Violation(f"the leader's time went on by {passed_s:.3f} s within {real_s:.3f} s")
        if began and event.at < state.folded_at:
            raise Violation(f"the leader begins at {event.at:.3f}, and its predecessor wrote {state.folded_at:.3f}")
        if not began and passed_s < real_s * (1 - DRIFT_MAX) - SLACK_S:
            raise Violation(f"the leader's time went on by only {passed_s:.3f} s within {real_s:.3f} s")
        if began:
            self.uncounted_s = max(0.0, self.uncounted_s + real_s - passed_s)

    def log_went_back(self) -> None:
        """What was folded last is lost, perhaps with the leader's time. The next leader counts an unknown part of the pause."""
        self.at, self.uncounted_s = None, math.inf
