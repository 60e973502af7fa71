"""The answers of a simulated agent, in memory: what production's `Ledger` keeps, without a database.

A large job has thousands of agents. A database for each would be half of the memory and a tenth of the time. The small worlds
have ledgers.
"""

from __future__ import annotations

from holdfast.domain.orders import OrderDone


class Answers:
    """Outlives its agent. Holds the highest epoch and the newest `answers_max` answers."""

    def __init__(self, answers_max: int) -> None:
        self._answers_max = answers_max
        self._answers: dict[str, OrderDone] = {}  # by command, oldest first
        self._epoch = 0

    @property
    def epoch(self) -> int:
        return self._epoch

    def raise_epoch(self, epoch: int) -> None:
        self._epoch = max(epoch, self._epoch)

    def answer(self, command_id: str) -> OrderDone | None:
        return self._answers.get(command_id)

    def remember(self, answer: OrderDone) -> None:
        self._answers.pop(answer.command_id, None)
        self._answers[answer.command_id] = answer
        if len(self._answers) > self._answers_max:
            del self._answers[next(iter(self._answers))]

    def __len__(self) -> int:
        return len(self._answers)
