"""Orders to the running ranks of one generation on this node, through their control channels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import anyio

from holdfast.agent.workers.worker import Worker
from holdfast.domain.errors import HoldfastError, Unavailable


class Ranks:
    """Every method raises `Unavailable` that names the rank if one does not accept the order."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers

    def save(self, at_step: int, leaving: str = "") -> None:
        _tell(self._workers, "checkpoint_now", **_save(at_step, leaving))

    async def agree_on_save(self, at_step: int, leaving: str = "") -> None:
        """Propose a save, and return when all ranks wait for the result when they reach the step. Raises `HoldfastError` with
        the reason if one cannot. A rank with an earlier version of the library gets the order itself."""
        _tell([each for each in self._workers if not each.votes], "checkpoint_now", **_save(at_step, leaving))
        errors: list[HoldfastError] = []
        async with anyio.create_task_group() as ranks:

            async def agree(worker: Worker) -> None:
                try:
                    await worker.agree(at_step)
                except HoldfastError as error:  # the first one decides
                    errors.append(error)
                    ranks.cancel_scope.cancel()

            for worker in self._voters:
                ranks.start_soon(agree, worker)
        if errors:
            raise errors[0]

    def save_as_agreed(self, at_step: int, leaving: str = "") -> None:
        """Tell the ranks that have agreed to a save to make it."""
        _tell(self._voters, "checkpoint_now", **_save(at_step, leaving))

    def do_not_save(self, at_step: int) -> None:
        """Tell the ranks that have agreed to a save that it is void."""
        _tell(self._voters, "void", at_step=at_step)

    def set_interval(self, from_step: int, interval_steps: int) -> None:
        _tell(self._workers, "interval", from_step=from_step, interval_steps=interval_steps)

    @property
    def _voters(self) -> list[Worker]:
        return [each for each in self._workers if each.votes]


def _save(at_step: int, leaving: str) -> dict[str, int | str]:
    """Return the fields of a `checkpoint_now` message."""
    return {"at_step": at_step} | ({"leaving": leaving} if leaving else {})


def _tell(workers: Iterable[Worker], kind: str, **fields: int | str) -> None:
    for worker in workers:
        if not worker.tell(kind, **fields):
            identity = worker.identity
            raise Unavailable(f"rank {identity.rank} of {identity.job} does not accept orders (pid {worker.pid})")
