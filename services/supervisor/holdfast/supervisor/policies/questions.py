"""Which questions to the policies go out now. No I/O: `term` asks them.

Facts go before decisions. A decision costs ten times what a finding costs to fold, and each finding that waits may make another
one of it: of ten thousand faults in one second, most would be decided two or three times, and thousands of changes that the
breaker should have stopped would have begun before it has heard of enough. So a few questions go out per turn while facts wait,
many while none do, and one that nobody wants an answer to any more does not go out at all.

Every turn asks some, so that no stream of facts, however long, keeps all decisions waiting.
"""

from __future__ import annotations

from collections import OrderedDict

from holdfast.supervisor.core import State
from holdfast.supervisor.protocol import Evaluate

PER_TURN_MAX = 64  # as many answers as are folded in a tenth of a second: a lease has to be renewed meanwhile
PER_TURN_BEHIND_MAX = 4  # while facts wait


class Questions:
    """First come, first asked; each incident waits once, however often it is asked about."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, Evaluate] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, question: Evaluate) -> None:
        self._waiting[question.incident] = question

    def due(self, state: State, *, behind: bool) -> list[Evaluate]:
        """What to ask after the turn that led to `state`; `behind`: facts wait to be folded."""
        if not self._waiting:
            return []
        wanted, asked = set(state.questions), list[Evaluate]()
        most = PER_TURN_BEHIND_MAX if behind else PER_TURN_MAX
        while self._waiting and len(asked) < most:
            incident, question = self._waiting.popitem(last=False)
            if incident in wanted:
                asked.append(question)
        return asked
