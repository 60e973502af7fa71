"""Orders of the agent that this rank has received and not yet carried out.

They arrive between two steps and take effect between two steps: saves at a named step, changes that end the process after the
save of a named step, another checkpoint interval from a named step on, and a stop.

A save is agreed on before it is made, so that either all ranks act at its step or none does: an order reaches some ranks
after that step if the steps become quicker than expected. A proposal has a `ballot`, which each rank answers. A yes binds the
rank: if it finishes the step before the result has arrived, it waits. All ranks save if all have answered yes. Normally the
result is there long before the step, and nobody waits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.train.channels import Control
from holdfast.train.intervals import Intervals

log = logging.getLogger("holdfast.train")
PENDING_SAVES_MAX = 8  # orders of saves at future steps; the earliest are kept
POLL_S = 0.005  # while this rank waits for an order

Miss = Callable[[int, str], None]  # reports a save that cannot be made: its step, why


class Orders:
    """The pending orders of one rank. `stop`: None = continue; otherwise whether to save before stopping."""

    def __init__(self, control: Control, interval_steps: int, *, rank: int, miss: Miss) -> None:
        self.stop: bool | None = None
        self._control = control
        self._rank = rank
        self._miss = miss
        self._intervals = Intervals(interval_steps)
        self._saves: set[int] = set()
        self._proposed: set[int] = set()  # steps whose save this rank has agreed to, without a result yet
        self._changes: dict[int, str] = {}  # steps after which a planned change ends this process, with its reason
        self._passed = -1  # a save of this step or an earlier one is too late, although the step may be the newest

    def poll(self, done: int) -> None:
        """Take the orders that have arrived, without blocking. `done`: steps finished."""
        for order in self._control.poll():
            self._take(order, done)

    def undecided(self, step: int) -> bool:
        """Whether this rank is bound to wait at `step` for the result of a proposal."""
        return step in self._proposed

    def await_result(self, step: int, done: int, timeout_s: float) -> None:
        """Wait until the proposal of a save at `step` is decided. Without a result in time, nothing is saved for it."""
        self._wait(lambda: step not in self._proposed, done, timeout_s)
        if step in self._proposed and self.stop is None:
            self._proposed.remove(step)
            self._passed = max(self._passed, step)
            self._miss(
                step, f"whether all ranks save it was not known {timeout_s:g} s after rank {self._rank} reached it"
            )

    def await_stop(self, done: int, timeout_s: float) -> bool:
        """Wait for an order to stop, and return whether it has arrived."""
        self._wait(lambda: False, done, timeout_s)
        return self.stop is not None

    def _wait(self, over: Callable[[], bool], done: int, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while not over() and self.stop is None and time.monotonic() < until:
            time.sleep(POLL_S)
            self.poll(done)

    def requested(self, step: int) -> bool:
        """Whether the supervisor has ordered a save at `step`."""
        return step in self._saves

    def due(self, step: int) -> bool:
        """Whether a save is due at `step`, by an order or by the interval."""
        return self.requested(step) or self._intervals.due(step)

    def change_after(self, step: int) -> str:
        """The reason of the planned change that ends this process after the save of `step`; empty if none does."""
        return self._changes.get(step, "")

    def pass_step(self, step: int) -> None:
        """The process waits for its end after the save of `step`: a save of it that is ordered now is too late."""
        self._passed = step

    def forget_until(self, step: int) -> None:
        """`step` has been dealt with."""
        self._saves = {at for at in self._saves if at > step}
        self._proposed = {at for at in self._proposed if at > step}
        self._changes = {at: why for at, why in self._changes.items() if at > step}

    def _vote(self, at_step: int, ballot: int, done: int) -> None:
        """Answer a proposal. A yes binds this rank, unless it cannot be sent."""
        free = len(self._proposed | {at_step}) <= PENDING_SAVES_MAX
        yes = free and at_step >= done and at_step > self._passed
        if self._control.answer("vote", ballot=ballot, yes=yes, done=done) and yes:
            self._proposed.add(at_step)

    def _take(self, order: Mapping[str, Any], done: int) -> None:
        match order:
            case {"type": "checkpoint_now", "at_step": int(at_step), "ballot": int(ballot)}:
                self._vote(at_step, ballot, done)
            case {"type": "void", "at_step": int(at_step)}:
                self._proposed.discard(at_step)
            case {"type": "checkpoint_now", "at_step": int(at_step), **more}:
                self._proposed.discard(at_step)
                if at_step < done or at_step <= self._passed:
                    self._miss(at_step, f"rank {self._rank} had already finished step {done}")
                else:
                    self._saves = set(sorted({*self._saves, at_step})[:PENDING_SAVES_MAX])
                    if reason := str(more.get("leaving") or ""):
                        kept = sorted({**self._changes, at_step: reason}.items())[:PENDING_SAVES_MAX]
                        self._changes = dict(kept)
            case {"type": "interval", "from_step": int(from_step), "interval_steps": int(interval_steps)}:
                self._intervals.change(from_step, interval_steps)
            case {"type": "stop", **more}:
                self.stop = bool(more.get("save"))
            case _:
                log.debug("ignored an order of unknown kind: %s", order)
