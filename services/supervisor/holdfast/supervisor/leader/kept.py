"""The state that a leader has committed, kept in its memory, for a Redis that has lost it.

A Redis can come back empty (no persistence, FLUSHALL) or with older data (a failover, the last second of an append-only file).
The supervisor that led until then has the newest state, because nothing is done before it is committed. Its next term begins
from the newer one of the two: the stored state and the kept one.

A Redis that is empty, or does not know the last leader, is left to the supervisor that knows most. For so long after it was
found so, nobody takes the lease who

    led until then                             0            its state is the newest
    led, and another one may have led since    ttl_s        the state of that one would be newer
    knows that somebody has led                2 · ttl_s    it would begin without any job
    knows of no leader                         0            a new fleet

A supervisor that sees another one lead forgets its own state.
"""

from __future__ import annotations

from holdfast.domain.errors import StaleEpoch
from holdfast.domain.words import plural
from holdfast.supervisor.core import State

ADVICE = "keep an append-only file (holdfast doctor checks it)"


class Kept:
    def __init__(self) -> None:
        self.led = False  # whether some supervisor is known to have led
        self.lost = False  # whether Redis was seen without the last leader since
        self._state: State | None = None
        self._left_at_s = 0.0

    def keep(self, state: State, now_s: float) -> None:
        """A term has ended. `state`: its last committed one; `now_s`: the loop's time."""
        self._state, self._left_at_s = state, now_s

    def is_of(self, epoch: int) -> bool:
        """Whether this is the state of the newest term. Its lease outlives it if Redis refuses the release."""
        return self._state is not None and self._state.epoch >= epoch

    def another_leads(self) -> None:
        self.led, self.lost, self._state = True, False, None

    def patience_s(self, now_s: float, ttl_s: float) -> float:
        """How long to leave a Redis that has lost data to a supervisor that may know more."""
        if self._state is not None:
            return 0.0 if now_s - self._left_at_s <= ttl_s else ttl_s
        return 2 * ttl_s if self.led else 0.0

    def choose(self, stored: State, epoch: int) -> tuple[State, str]:
        """The state to begin a term of `epoch` from, and what Redis has lost; "" if nothing. Raises `StaleEpoch` if the kept
        state is of this epoch already, which no log hands out to the holder that had it."""
        kept = self._state
        if kept is None or kept.epoch < stored.epoch or kept.folded_at <= stored.folded_at:
            lost = "its last writes" if stored.epoch else "all jobs, incidents and records of nodes"
            if self.lost or (self.led and not stored.epoch):
                return stored, (
                    f"Redis has lost {lost}, and no supervisor has them in memory. Workers of a job that is not known are left "
                    f"alone; see docs/supervisor-machine.md, and {ADVICE}"
                )
            return stored, ""
        if kept.epoch >= epoch:
            raise StaleEpoch(f"epoch {epoch} is not newer than that of the state in memory, {kept.epoch}")
        jobs = plural(sum(not job.phase.finished for job in kept.jobs.values()), "job")
        what = f"the last {kept.folded_at - stored.folded_at:.1f} s" if stored.epoch else "all data"
        return kept, f"Redis has lost {what}; the state of {jobs} was put back from this supervisor's memory: {ADVICE}"
