"""Orders that were sent and not answered: they go out again. Pure.

An agent carries an order out once, however often it comes, so that saying it again costs a message and saves a generation
change that would wait for its timeout, and then blame a node which was never asked. What takes long is asked for ever more
rarely. A start takes no time, and all ranks wait for the last one: it is repeated at an even pace.
"""

from __future__ import annotations

from collections.abc import Container

from holdfast.domain.orders import Start
from holdfast.supervisor.core import State
from holdfast.supervisor.protocol import Broadcast, Send

FIRST_S = 2.0  # most orders are answered within milliseconds
PAUSE_S_MAX = 30.0
AT_ONCE_MAX = 1000  # of a fleet that all prepare at the same time, the rest comes with the next look


class Unanswered:
    """Of one term. Times are seconds of any clock that is never set."""

    def __init__(self) -> None:
        self._due: dict[str, tuple[float, float]] = {}  # command id → (when it is due, pause after that)

    def due(self, state: State, connected: Container[str], now_s: float) -> list[Send]:
        """What to send again now: orders that their nodes, which are `connected`, have had for long enough."""
        later = (now_s + FIRST_S, 2 * FIRST_S)
        due = {id_: self._due.get(id_, later) for id_, send in state.outbox.items() if send.node in connected}
        slots: dict[str, tuple[Broadcast, int]] = {}
        for job, unanswered in state.unanswered.items():
            broadcast = state.broadcasts[job]
            for slot in unanswered:
                if broadcast.placements[slot].node in connected:
                    id_ = broadcast.id_of(slot)
                    due[id_], slots[id_] = self._due.get(id_, later), (broadcast, slot)
        self._due = due
        again = [id_ for id_, (due_s, _) in due.items() if due_s <= now_s][:AT_ONCE_MAX]
        for id_ in again:
            _, pause_s = due[id_]
            order = slots[id_][0].order if id_ in slots else state.outbox[id_].order
            if isinstance(order, Start):
                pause_s = FIRST_S
            due[id_] = (now_s + pause_s, min(2 * pause_s, PAUSE_S_MAX))
        return [slots[id_][0].send(slots[id_][1]) if id_ in slots else state.outbox[id_] for id_ in again]
