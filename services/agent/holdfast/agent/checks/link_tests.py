"""Tests the network with another node, on the supervisor's order, while both nodes have no ranks.

A test never delays a job: an order to prepare cancels it within milliseconds and does not wait for its end. A cancelled test
has no result."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import structlog
from anyio.abc import TaskGroup

from holdfast.agent.outcome import Outcome
from holdfast.agent.replicator import Replicator
from holdfast.domain.errors import Conflict, HoldfastError
from holdfast.domain.links import MeasureLink, OpenLink
from holdfast.domain.orders import CheckLink

log = structlog.get_logger("holdfast.agent.links")


class LinkTests:
    """Executes `CheckLink`. `is_idle`: the node neither has nor prepares workers. `tasks` outlives the order."""

    def __init__(
        self, node: str, tasks: TaskGroup, replicator: Callable[[], Replicator], is_idle: Callable[[], bool]
    ) -> None:
        self._node, self._tasks, self._replicator, self._is_idle = node, tasks, replicator, is_idle
        self._under_way: anyio.CancelScope | None = None
        self._is_open = False  # the replicator may wait for another node

    async def carry_out(self, order: CheckLink) -> Outcome:
        """Raises `Conflict` if the node has or prepares workers, or begins to, and `Unavailable` if the test did not finish."""
        if not self._is_idle():
            raise Conflict(f"{self._node} has work and does not test the network")
        if self._under_way is not None:
            raise Conflict(f"{self._node} is already testing the network")
        with anyio.CancelScope() as self._under_way:
            try:
                return await self._test(order)
            finally:
                self._under_way = None
        raise Conflict(f"{self._node} received work, which cancelled its test of the network with {order.partner}")

    def make_way(self) -> None:
        """End a test, because a job needs this node."""
        if self._under_way is not None:
            self._under_way.cancel()
        if self._is_open:
            self._is_open = False
            self._tasks.start_soon(self._close, name="close link")

    async def _test(self, order: CheckLink) -> Outcome:
        replicator = self._replicator()
        if not order.endpoint:
            self._is_open = True
            await replicator.open_link(OpenLink(order.token, order.limits, order.for_s))
            return Outcome()
        found = await replicator.measure_link(MeasureLink(order.partner, order.endpoint, order.token, order.limits))
        log.info(
            "network tested",
            partner=order.partner,
            out_bytes_per_s=round(found.out_bytes_per_s),
            in_bytes_per_s=round(found.in_bytes_per_s),
            round_trip_s=found.round_trip_s,
            failure=found.failure or "none",
        )
        return Outcome(link=found)

    async def _close(self) -> None:
        try:
            await self._replicator().close_link()
        except HoldfastError as error:  # the replicator has ended, and the test with it, or the limits end the test
            log.info("test of the network not ended", reason=str(error))
