"""Which generation of each job this node prepares and obeys. Pure.

* An order to prepare a generation ends the preparation of an older one. From then on, orders about older ones are refused.
* An order to stop ends the preparation of the generations that it stops.
* An order to prepare with another token is about another run of the same name, which counts its generations from 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.domain.errors import Conflict
from holdfast.domain.orders import Prepare, Stop


@dataclass(eq=False, frozen=True, slots=True)
class Preparation:
    """An order to prepare that is in progress. `cancel` ends it; its workers are ended by the order that caused this."""

    order: Prepare
    cancel: Callable[[], None]


@dataclass(slots=True)
class _Newest:
    token: str  # identifies the run
    generation: int
    preparation: Preparation | None


class Generations:
    def __init__(self) -> None:
        self._newest: dict[str, _Newest] = {}  # by job

    @property
    def is_preparing(self) -> bool:
        return any(newest.preparation is not None for newest in self._newest.values())

    def prepare(self, order: Prepare, cancel: Callable[[], None]) -> Preparation:
        """Record the generation, and cancel the preparation of an older one. Raises `Conflict` if a newer one is known.
        The caller reports the end of the preparation with `over`."""
        before = self._newest.get(order.job)
        if before is not None and before.token == order.token:
            self.refuse_older(order.job, order.generation)
        preparation = Preparation(order, cancel)
        self._newest[order.job] = _Newest(order.token, order.generation, preparation)
        if before is not None and before.preparation is not None:
            before.preparation.cancel()
        return preparation

    def is_current(self, preparation: Preparation) -> bool:
        newest = self._newest.get(preparation.order.job)
        return newest is not None and newest.preparation is preparation

    def over(self, preparation: Preparation) -> None:
        """Record the end of a preparation, unless a newer one has taken its place."""
        if self.is_current(preparation):
            self._newest[preparation.order.job].preparation = None

    def overtaken(self, order: Prepare) -> Conflict:
        """Return the answer to an order whose preparation was cancelled."""
        newest = self._newest.get(order.job)
        overtaken = newest is not None and (newest.token, newest.generation) != (order.token, order.generation)
        cause = f"overtaken by {newest.generation}" if newest and overtaken else "stopped"
        return Conflict(f"generation {order.generation} of {order.job} was {cause} while it was prepared")

    def stop(self, order: Stop) -> None:
        """Cancel the preparation of a generation that the order stops."""
        newest = self._newest.get(order.job)
        if newest is not None and newest.preparation is not None and newest.generation <= order.generation:
            newest.preparation.cancel()

    def forget(self, job: str) -> None:
        self._newest.pop(job, None)

    def refuse_older(self, job: str, generation: int) -> None:
        """Raises `Conflict` if a newer generation of the job has been prepared, or is being prepared."""
        newest = self._newest[job].generation if job in self._newest else 0
        if generation < newest:
            raise Conflict(f"generation {generation} of {job} is over: {newest} has been prepared here")
