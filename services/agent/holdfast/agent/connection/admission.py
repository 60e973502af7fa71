"""Decides which orders are executed. Every order is executed once per `command_id`, however often it is sent, also across
restarts of the agent. Pure, except for its `Record`, which is on disk.

* An order with a lower leader epoch than the highest seen, in an order or a greeting, comes from a replaced leader. It is
  refused and not remembered, because the new leader may send the same order.
* An order that has been answered is answered again from the record. An order in progress is not started twice.
* The answer is on disk before it is sent. If the agent exits before that, its workers exit with it, so a repeated order
  finds a node without workers and is executed again.
* A GPU is reset at most once per order: before the reset begins, the record stores the answer that its outcome is unknown. An
  agent that exits during a reset gives this answer when the order is repeated. The same applies to a reboot.
* An agent that cannot write to its disk reports that in its answers and accepts no orders, because it could not keep the first
  two guarantees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from holdfast.domain.errors import HoldfastError
from holdfast.domain.evolve import evolve
from holdfast.domain.nodes import RunningWorker
from holdfast.domain.orders import Order, OrderDone, RebootNode, ResetGpu

ORDERS_MAX = 64  # orders in progress
UNKNOWN_OUTCOME = "the agent ended while it executed this order; the outcome is not known"


class Record(Protocol):
    """Survives the agent. Each method raises `HoldfastError` if the disk rejects the write."""

    @property
    def epoch(self) -> int: ...
    def raise_epoch(self, epoch: int) -> None: ...
    def answer(self, command_id: str) -> OrderDone | None: ...
    def remember(self, answer: OrderDone) -> None: ...


class Verdict(NamedTuple):
    """`answer` is sent immediately; None if the order is executed now (`execute`) or is in progress."""

    execute: bool
    answer: OrderDone | None
    reason: str
    refused: bool = False


class Admission:
    def __init__(self, record: Record) -> None:
        self._record = record
        self._in_progress: set[str] = set()

    @property
    def epoch(self) -> int:
        """The highest epoch seen."""
        return self._record.epoch

    @property
    def in_progress(self) -> frozenset[str]:
        return frozenset(self._in_progress)

    def greet(self, epoch: int) -> bool:
        """Record the epoch of a supervisor that greets this agent as its leader. Returns False if a later leader was seen.
        Raises `HoldfastError` if the disk rejects the write; orders are then refused as well."""
        if epoch < self._record.epoch:
            return False
        self._record.raise_epoch(epoch)
        return True

    def admit(self, epoch: int, command_id: str, order: Order, at: float) -> Verdict:
        """Decide about an order that has arrived. An order to execute must be finished with `finish`."""
        if epoch < self._record.epoch:
            seen = self._record.epoch
            return _refused(command_id, f"epoch {epoch} is over: a leader of epoch {seen} has been seen", at)
        try:
            self._record.raise_epoch(epoch)
            if command_id in self._in_progress:
                return Verdict(False, None, "it is in progress")
            if (known := self._record.answer(command_id)) is not None:
                return Verdict(False, known, "it has been executed")
            if len(self._in_progress) >= ORDERS_MAX:
                return _refused(command_id, f"{ORDERS_MAX} orders are in progress on this node; try again", at)
            if isinstance(order, ResetGpu | RebootNode):
                self._record.remember(OrderDone(command_id, ok=False, reason=UNKNOWN_OUTCOME, at=at))
        except HoldfastError as error:
            return _refused(command_id, str(error), at)
        self._in_progress.add(command_id)
        return Verdict(True, None, "it is new")

    def finish(self, answer: OrderDone, workers_version: Callable[[Sequence[RunningWorker]], int]) -> OrderDone:
        """Store the answer to an executed order and return the answer to send. `workers_version` returns the version of the
        node's set of workers if it consists of these, or 0."""
        try:
            self._record.remember(answer)
        except HoldfastError as error:  # the effects remain, but the order counts as failed
            return OrderDone(answer.command_id, ok=False, reason=str(error), at=answer.at)
        finally:
            self._in_progress.discard(answer.command_id)
        # The version is not stored: the set may have changed when the answer is repeated.
        return evolve(answer, workers_version=workers_version(answer.workers)) if answer.workers else answer


def _refused(command_id: str, reason: str, at: float) -> Verdict:
    return Verdict(False, OrderDone(command_id, ok=False, reason=reason, at=at), reason, refused=True)
