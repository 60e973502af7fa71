"""Executes the orders that `Admission` admits, each in a task of its own, so that a slow one does not delay others."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

import structlog
from anyio.abc import TaskGroup

from holdfast.agent.connection.admission import Admission, Record
from holdfast.agent.outcome import Outcome, answer_of
from holdfast.domain.errors import HoldfastError
from holdfast.domain.nodes import RunningWorker
from holdfast.domain.orders import Order, OrderDone, Prepare, ResetGpu, Start
from holdfast.runtime.telling import telemetry

log = structlog.get_logger("holdfast.agent.orders")


class Executor:
    """`carry_out` executes an order, `report` sends the answer. `workers_version` is that of `Admission.finish`.

    The supervisor learns from heartbeats that a `Start` succeeded, so the answer is sent only if the order is repeated."""

    def __init__(
        self,
        *,
        tasks: TaskGroup,
        ledger: Record,
        carry_out: Callable[[Order], Awaitable[Outcome]],
        report: Callable[[OrderDone], None],
        workers_version: Callable[[Sequence[RunningWorker]], int] = lambda _: 0,
    ) -> None:
        self._tasks = tasks
        self._admission = Admission(ledger)
        self._carry_out = carry_out
        self._report = report
        self._workers_version = workers_version

    @property
    def epoch(self) -> int:
        return self._admission.epoch

    def greet(self, epoch: int) -> bool:
        """Return whether a supervisor with this epoch may lead this agent. From now on, earlier leaders may not."""
        try:
            return self._admission.greet(epoch)
        except HoldfastError as error:  # the session opens, so that the answers to orders report the disk
            log.warning("epoch of the leader not recorded", epoch=epoch, reason=str(error))
            return True

    def submit(self, epoch: int, command_id: str, order: Order) -> None:
        """Execute an order, repeat its answer, or refuse it. Errors of the order are part of the answer and are not raised."""
        name = type(order).__name__
        verdict = self._admission.admit(epoch, command_id, order, time.time())
        if verdict.execute:
            self._tasks.start_soon(self._execute, command_id, order, name=f"order {name}")
            return
        say = log.warning if verdict.refused else log.debug
        say(
            "order refused" if verdict.refused else "order repeated",
            order=name,
            command_id=command_id,
            reason=verdict.reason,
        )
        if verdict.answer is not None:
            self._report(verdict.answer)

    async def _execute(self, command_id: str, order: Order) -> None:
        traceparent = order.traceparent if isinstance(order, Prepare | Start | ResetGpu) else ""
        with telemetry.within(traceparent), structlog.contextvars.bound_contextvars(job=order.job):
            result = await self._result(command_id, order)
            answer = self._admission.finish(answer_of(command_id, result, time.time()), self._workers_version)
            log.info(
                "order done", order=type(order).__name__, command_id=command_id, ok=answer.ok, reason=answer.reason
            )
            if not (isinstance(order, Start) and answer.ok):
                self._report(answer)

    async def _result(self, command_id: str, order: Order) -> Outcome | Exception:
        try:
            return await self._carry_out(order)
        except (HoldfastError, OSError) as error:
            return error
        except Exception as error:
            # A bug. Exiting would end healthy workers as well; the supervisor replaces the node instead.
            log.exception("order failed", order=type(order).__name__, command_id=command_id)
            return error
