"""Agreement of all ranks on one step to save, made by background threads while training continues.

Theory. A rank that received a signal reports it on the board. Rank 0 proposes a future step. Every rank's watcher passes the
proposal to the `Gate` of its training thread. If `run.checkpoint` has not reached that step yet, the rank votes yes and is
bound by the vote: if the training thread reaches the step before the result is known, it waits. If all vote yes, every rank
saves that step. If one votes no (it has passed the step), the proposal is void, no rank saves, and rank 0 proposes a later
step. Each proposal has exactly one result, because "the last yes" and "the first no" exclude each other. So no rank saves, or
leaves, alone.

A signal is answered within three polls, the lead (two polls' worth of steps) and the current step: in about a second if steps
are shorter than a poll, otherwise in two steps. Beyond 12,500 ranks the polls are farther
apart (`paced`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from holdfast.train.standalone.board import Board, paced

log = logging.getLogger("holdfast.train")

POLL_S: Final = 0.25  # one small request per rank to the store
POLL_PENDING_S: Final = 0.02  # while a proposal is open
LEAD_POLLS: Final = 2
LEAD_MAX_S: Final = 60.0
VERDICT_TIMEOUT_S: Final = 10.0  # for a training thread that has reached a proposed step


@dataclass(frozen=True, slots=True)
class Proposal:
    number: int
    step: int
    leave: bool  # the run is to end after the save


class Gate:
    """Shared by the training thread, which calls `due`, and the watcher, which calls the other methods."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._promised: Proposal | None = None
        self._agreed = False
        self._last: tuple[int, float] | None = None  # step of the latest `due`, and when
        self.step_s = 0.0  # duration of the last step

    @property
    def step(self) -> int:
        return self._last[0] if self._last is not None else 0

    @property
    def bound(self) -> bool:
        """Whether the training thread is bound to a proposal."""
        return self._promised is not None

    def blocks(self, step: int) -> bool:
        """Whether `due(step)` would wait for the result of a proposal."""
        with self._changed:
            return self._promised is not None and self._promised.step <= step and not self._agreed

    def due(self, step: int, timeout_s: float = VERDICT_TIMEOUT_S) -> Proposal | None:
        """Report that the training thread has finished `step`. Returns the agreed proposal for this step, if there is one."""
        with self._changed:
            now = self._clock()
            if self._last is not None and step > self._last[0]:
                self.step_s = (now - self._last[1]) / (step - self._last[0])
            self._last = (step, now)
            if self._promised is None or self._promised.step > step:
                return None
            if not self._changed.wait_for(lambda: self._agreed or self._promised is None, timeout_s):
                log.warning("no agreement on the emergency save of step %d within %g s: continuing", step, timeout_s)
                self._promised = None
                return None
            proposal, self._promised, self._agreed = self._promised, None, False
            return proposal

    def promise(self, proposal: Proposal) -> bool:
        """Bind the training thread to a proposal. Returns False if the thread has passed that step or is bound to
        another one."""
        with self._changed:
            if proposal.step <= self.step or self._promised is not None:
                return False
            self._promised, self._agreed = proposal, False
            return True

    def decide(self, number: int, agreed: bool) -> None:
        with self._changed:
            if self._promised is not None and self._promised.number == number:
                self._agreed = agreed
                if not agreed:
                    self._promised = None
                self._changed.notify_all()


class Agreement:
    """One rank's part in the agreement. Only the watcher calls `poll`."""

    def __init__(self, board: Board, gate: Gate, *, rank: int, world_size: int) -> None:
        self._board = board
        self._gate = gate
        self._rank = rank
        self._world_size = world_size
        self._seen = 0  # proposals voted on
        self._open: int | None = None
        self._answered = 0  # rank 0: requests that the latest proposal covers
        self.poll_s = paced(POLL_S, world_size)
        self._pending_s = paced(POLL_PENDING_S, world_size)
        self._lead_s = LEAD_POLLS * self.poll_s if world_size > 1 else 0.0
        self.awaiting = False  # this rank has requested a save that is not agreed yet
        self.verdicts = 0

    def ask(self, *, leave: bool) -> None:
        """Request a save on behalf of this rank; with `leave`, the run ends afterwards."""
        if leave:
            self._board.put("leave", "1")
        self.awaiting = True
        self._board.count("asked", 1)

    def poll(self) -> float:
        """Read the board once, vote or propose, and return the seconds until the next poll. Raises Unavailable."""
        if self._rank == 0 and self._open is None and not self._gate.bound:
            asked = self._board.count("asked")
            if asked > self._answered:
                self._propose()
                self._answered = asked
        if self._open is None and self._board.count("proposals") > self._seen:  # one proposal at a time
            self._vote(self._seen + 1)
        if self._open is None:
            return self.poll_s
        verdict = self._board.get(f"verdict/{self._open}")
        if verdict is None:
            return self._pending_s
        self._gate.decide(self._open, verdict == "save")
        self.verdicts += 1
        self.awaiting = self.awaiting and verdict != "save"
        self._open = None
        if verdict == "void" and self._rank == 0:
            self._answered = 0  # propose a later step
            self._lead_s = min(2 * self._lead_s, LEAD_MAX_S)
        return self._pending_s

    def _propose(self) -> None:
        gate = self._gate
        lead = 1 + (math.ceil(self._lead_s / gate.step_s) if gate.step_s > 0 else 1 if self._lead_s else 0)
        leave = self._board.get("leave") or "0"
        self._board.put(f"proposal/{self._board.count('proposals') + 1}", f"{gate.step + lead} {leave}")
        self._board.count("proposals", 1)

    def _vote(self, number: int) -> None:
        """Vote once on each proposal. A yes binds this rank."""
        text = self._board.get(f"proposal/{number}")
        assert text is not None  # written before it is counted
        step, leave = text.split()
        self._seen, self._open = number, number
        if self._gate.promise(Proposal(number, int(step), leave == "1")):
            if self._board.count(f"yes/{number}", 1) == self._world_size:
                self._board.put(f"verdict/{number}", "save")
        elif self._board.count(f"no/{number}", 1) == 1:
            self._board.put(f"verdict/{number}", "void")
