"""The answers of a simulated agent, in memory: what production's `Ledger` keeps, without a database.

A large job has thousands of agents. A database for each would be half of the memory and a tenth of the time. The small worlds
have ledgers.
"""

from __future__ import annotations

from holdfast.domain.orders import OrderDone


class Answers:
    """Outlives its agent. Holds the highest epoch, and the answers among the last `answers_max` writes."""

    def __init__(self, answers_max: int) -> None:
        self._answers_max = answers_max
        self._answers: dict[str, tuple[int, OrderDone]] = {}  # by command, oldest first; with the number of the write
        self._writes = 0
        self._epoch = 0

    @property
    def epoch(self) -> int:
        return self._epoch

    def raise_epoch(self, epoch: int) -> None:
        self._epoch = max(epoch, self._epoch)

    def answer(self, command_id: str) -> OrderDone | None:
        known = self._answers.get(command_id)
        return None if known is None else known[1]

    def remember(self, answer: OrderDone) -> None:
        self._writes += 1
        self._answers.pop(answer.command_id, None)
        self._answers[answer.command_id] = (self._writes, answer)
        oldest = next(iter(self._answers))
        if self._answers[oldest][0] <= self._writes - self._answers_max:
            del self._answers[oldest]

    def __len__(self) -> int:
        return len(self._answers)
