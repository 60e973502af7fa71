"""Orders that were sent and not answered: they go out again. Pure.

An agent carries an order out once, however often it comes, so that saying it again costs a message and saves a generation
change that would wait for its timeout, and then blame a node which was never asked. What takes long is asked for ever more
rarely.
"""

from __future__ import annotations

from collections.abc import Container, Mapping

from holdfast.supervisor.protocol import Send

FIRST_S = 2.0  # most orders are answered within milliseconds
PAUSE_S_MAX = 30.0
AT_ONCE_MAX = 1000  # of a fleet that all prepare at the same time, the rest comes with the next look


class Unanswered:
    """Of one term. Times are seconds of any clock that is never set."""

    def __init__(self) -> None:
        self._due: dict[str, tuple[float, float]] = {}  # command id → (when it is due, pause after that)

    def due(self, outbox: Mapping[str, Send], connected: Container[str], now_s: float) -> list[Send]:
        """What to send again now: orders that their nodes, which are `connected`, have had for long enough."""
        self._due = {
            command: self._due.get(command, (now_s + FIRST_S, 2 * FIRST_S))
            for command, send in outbox.items()
            if send.node in connected
        }
        again = [command for command, (due_s, _) in self._due.items() if due_s <= now_s][:AT_ONCE_MAX]
        for command in again:
            _, pause_s = self._due[command]
            self._due[command] = (now_s + pause_s, min(2 * pause_s, PAUSE_S_MAX))
        return [outbox[command] for command in again]
