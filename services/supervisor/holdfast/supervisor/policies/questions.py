"""Selects the questions to policies that are sent now. No I/O: `term` sends them.

Facts are folded before decisions are made. A decision costs ten times as much as folding a finding, and each waiting finding
may change the decision. With ten thousand faults in one second, most would be decided two or three times, and thousands of
changes would begin before the breaker has counted enough faults to stop them. So few questions are sent per turn while facts
wait, and many otherwise. A withdrawn question is not sent at all.

Every turn sends some questions, so that no stream of facts, however long, delays all decisions.
"""

from __future__ import annotations

from collections import OrderedDict

from holdfast.supervisor.core import State
from holdfast.supervisor.protocol import Evaluate

PER_TURN_MAX = 64  # the number of answers that are folded in a tenth of a second: the lease must be renewed, too
PER_TURN_BEHIND_MAX = 4  # while facts wait


class Questions:
    """First come, first served. Each incident waits once, however often its question is added."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, Evaluate] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, question: Evaluate) -> None:
        self._waiting[question.incident] = question

    def due(self, state: State, *, behind: bool) -> list[Evaluate]:
        """The questions to send after the turn that led to `state`; `behind`: facts wait to be folded."""
        if not self._waiting:
            return []
        wanted, asked = set(state.questions), list[Evaluate]()
        most = PER_TURN_BEHIND_MAX if behind else PER_TURN_MAX
        while self._waiting and len(asked) < most:
            incident, question = self._waiting.popitem(last=False)
            if incident in wanted:
                asked.append(question)
        return asked
