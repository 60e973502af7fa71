"""The ranks of a simulated node: processes that hang, die or end, and save when they are ordered to."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.domain.errors import Conflict
from holdfast.domain.orders import CheckpointNow, Prepare, SaveStage, SetInterval


@dataclass(slots=True)
class Workers:
    """This node's ranks of one generation."""

    order: Prepare
    started: bool = False
    ready: bool = False
    dead: set[int] = field(default_factory=set)
    hung: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)  # ended with exit code 0
    step: int = 0  # newest step that its ranks have finished
    save_at: set[int] = field(default_factory=set)
    proposed: set[int] = field(default_factory=set)  # steps at which its ranks wait for the result of a proposal
    agreed: set[int] = field(default_factory=set)  # steps that all ranks have agreed to save
    intervals: list[tuple[int, int]] = field(default_factory=list)  # (from step, interval), as ordered

    def due(self, step: int) -> bool:
        """Whether these ranks save after `step`."""
        changes = [interval for start, interval in self.intervals if start <= step]
        interval = changes[-1] if changes else self.order.checkpoint.interval_steps
        return step in self.save_at or (interval > 0 and step % interval == 0)

    def propose(self, step: int) -> None:
        """Raises `Conflict` if the ranks have passed the step."""
        if step <= self.step:
            raise Conflict(f"the ranks have finished step {self.step}")
        self.proposed.add(step)

    def save(self, order: CheckpointNow) -> None:
        self.proposed.discard(order.at_step)
        self.save_at.add(order.at_step)
        if order.stage == SaveStage.AGREED:
            self.agreed.add(order.at_step)

    def change_interval(self, order: SetInterval) -> None:
        self.intervals = [entry for entry in self.intervals if entry[0] < order.from_step]
        self.intervals.append((order.from_step, order.interval_steps))

    @property
    def running(self) -> bool:
        return self.started and not self.dead and not self.hung

    @property
    def living(self) -> tuple[int, ...]:
        if not self.ready:
            return ()
        gone = self.dead | self.done
        return tuple(rank for rank in self.order.placement.ranks if rank not in gone)
