"""The answers of a large job's agents, in memory, are those that production's ledger gives."""

from __future__ import annotations

from pathlib import Path
from random import Random

from holdfast.agent.connection.ledger import Ledger
from holdfast.domain.orders import OrderDone
from holdfast.sim.answers import Answers


def test_the_same_writes_give_the_same_answers(tmp_path: Path) -> None:
    chance, commands = Random(1), [f"c{number}" for number in range(8)]
    known = 0
    with Ledger(tmp_path / "ledger", answers_max=4) as ledger:
        answers = Answers(4)
        for number in range(300):
            if chance.random() < 0.2:
                epoch = chance.randint(1, 50)
                ledger.raise_epoch(epoch)
                answers.raise_epoch(epoch)
            else:
                done = OrderDone(chance.choice(commands), ok=chance.random() < 0.5, at=float(number))
                ledger.remember(done)
                answers.remember(done)
            assert answers.epoch == ledger.epoch
            for command in commands:
                assert answers.answer(command) == ledger.answer(command)
            known += len(answers)
    assert known > 300  # there were answers to compare
