"""Executes every order once per `command_id`, however often it is sent, also across restarts of the agent.

* An order with a lower leader epoch than the highest seen comes from a replaced leader. It is refused and not
  remembered, because the new leader may send the same order.
* An order that has been answered is answered again from memory. An order in progress is not started twice.
* A `Start` that succeeded is not answered if heartbeats answer it. When it is repeated, its answer is sent.
* The answer is on disk before it is sent. If the agent exits before that, its workers exit with it, so a repeated order
  finds a node without workers and is executed again.
* A GPU is reset at most once per order: before the reset begins, the ledger stores the answer that its outcome is unknown. An
  agent that exits during a reset gives this answer when the order is repeated.
* An agent that cannot write to its disk reports that in its answers and accepts no orders, because it could not keep the first
  two guarantees.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import structlog
from anyio.abc import TaskGroup

from holdfast.agent.ledger import Ledger
from holdfast.agent.node import FailedTests, Outcome
from holdfast.domain.errors import HoldfastError, Unrestorable
from holdfast.domain.nodes import RunningWorker
from holdfast.domain.orders import Order, OrderDone, Prepare, RebootNode, ResetGpu, Start
from holdfast.runtime import telemetry

log = structlog.get_logger("holdfast.agent.orders")

ORDERS_MAX = 64  # orders in progress
UNKNOWN_OUTCOME = "the agent ended while it executed this order; the outcome is not known"


class Executor:
    """`carry_out` executes an order, `report` sends the answer. `workers_version` returns the version of the node's set of
    workers if it consists of these, or 0. `starts_in_beats`: whether the supervisor learns from heartbeats that a `Start`
    succeeded. Orders run in `tasks`, so that a slow one does not delay others."""

    def __init__(
        self,
        *,
        tasks: TaskGroup,
        ledger: Ledger,
        carry_out: Callable[[Order], Awaitable[Outcome]],
        report: Callable[[OrderDone], None],
        workers_version: Callable[[Sequence[RunningWorker]], int] = lambda _: 0,
        starts_in_beats: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tasks = tasks
        self._ledger = ledger
        self._carry_out = carry_out
        self._report = report
        self._workers_version = workers_version
        self._starts_in_beats = starts_in_beats
        self._clock = clock
        self._under_way: set[str] = set()

    @property
    def epoch(self) -> int:
        return self._ledger.epoch

    def raise_epoch(self, epoch: int) -> None:
        """Record the epoch of a leader's greeting."""
        self._ledger.raise_epoch(epoch)

    def submit(self, epoch: int, command_id: str, order: Order) -> None:
        """Execute an order, repeat its answer, or refuse it. Errors of the order are part of the answer and are not raised."""
        name = type(order).__name__
        if epoch < self._ledger.epoch:
            self._refuse(
                command_id, name, f"epoch {epoch} is over: a leader of epoch {self._ledger.epoch} has been seen"
            )
            return
        try:
            self._ledger.raise_epoch(epoch)
            known = self._ledger.answer(command_id)
        except HoldfastError as error:
            self._refuse(command_id, name, str(error))
            return
        if command_id in self._under_way:
            log.debug("order repeated while in progress", order=name, command_id=command_id)
        elif known is not None:
            self._report(known)
        elif len(self._under_way) >= ORDERS_MAX:
            self._refuse(command_id, name, f"{ORDERS_MAX} orders are in progress on this node; try again")
        else:
            self._under_way.add(command_id)
            self._tasks.start_soon(self._execute, command_id, order, name=f"order {name}")

    def _refuse(self, command_id: str, name: str, reason: str) -> None:
        log.warning("order refused", order=name, command_id=command_id, reason=reason)
        self._report(OrderDone(command_id, ok=False, reason=reason, at=self._clock()))

    async def _execute(self, command_id: str, order: Order) -> None:
        traceparent = order.traceparent if isinstance(order, Prepare | Start | ResetGpu) else ""
        with telemetry.within(traceparent), structlog.contextvars.bound_contextvars(job=order.job):
            await self._execute_once(command_id, order)

    async def _execute_once(self, command_id: str, order: Order) -> None:
        name = type(order).__name__
        try:
            if isinstance(order, ResetGpu | RebootNode):
                self._ledger.remember(OrderDone(command_id, ok=False, reason=UNKNOWN_OUTCOME, at=self._clock()))
            answer = await self._answer(command_id, order)
            self._ledger.remember(answer)
            if answer.workers:  # the version is not stored: the set may have changed when the answer is repeated
                answer = replace(answer, workers_version=self._workers_version(answer.workers))
        except HoldfastError as error:  # an error of the ledger: the effects remain, but the order counts as failed
            answer = OrderDone(command_id, ok=False, reason=str(error), at=self._clock())
        finally:
            self._under_way.discard(command_id)
        log.info("order done", order=name, command_id=command_id, ok=answer.ok, reason=answer.reason)
        if not (isinstance(order, Start) and answer.ok and self._starts_in_beats()):
            self._report(answer)

    async def _answer(self, command_id: str, order: Order) -> OrderDone:
        try:
            outcome = await self._carry_out(order)
        except (HoldfastError, OSError) as error:
            unrestorable = isinstance(error, Unrestorable)
            tested = error.tested if isinstance(error, FailedTests) else None
            return OrderDone(
                command_id, ok=False, reason=str(error), at=self._clock(), unrestorable=unrestorable, tested=tested
            )
        except Exception as error:
            # A bug. Exiting would end healthy workers as well; the supervisor replaces the node instead.
            log.exception("order failed", order=type(order).__name__, command_id=command_id)
            return OrderDone(
                command_id, ok=False, reason=f"agent bug: {type(error).__name__}: {error}", at=self._clock()
            )
        return OrderDone(
            command_id,
            ok=True,
            reason=outcome.reason,
            master=outcome.master,
            at=self._clock(),
            phases_s=outcome.phases_s,
            workers=outcome.workers,
            restored_from=outcome.restored_from,
            restored_bytes=outcome.restored_bytes,
            tested=outcome.tested,
            link=outcome.link,
        )
