"""Orders of the agent that this rank has received and not yet carried out.

They arrive between two steps and take effect between two steps: saves at a named step, changes that end the process after the
save of a named step, another checkpoint interval from a named step on, and a stop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.train.channels import Control
from holdfast.train.intervals import Intervals

log = logging.getLogger("holdfast.train")
PENDING_SAVES_MAX = 8  # orders of saves at future steps; the earliest are kept

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
        self._changes: dict[int, str] = {}  # steps after which a planned change ends this process, with its reason
        self._passed = -1  # a save of this step or an earlier one is too late, although the step may be the newest

    def poll(self, done: int) -> None:
        """Take the orders that have arrived, without blocking. `done`: steps finished."""
        for order in self._control.poll():
            self._take(order, done)

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
        self._changes = {at: why for at, why in self._changes.items() if at > step}

    def _take(self, order: Mapping[str, Any], done: int) -> None:
        match order:
            case {"type": "checkpoint_now", "at_step": int(at_step), **more}:
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
