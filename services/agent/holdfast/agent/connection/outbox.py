"""Queue of signals for diagnostics. Pure.

* Signals of `RELIABLE` types are kept until the tick that contained them is acknowledged. On a new stream they are sent again
  with the same tick number, so that diagnostics recognises the repetition. Only kernel lines are limited, oldest first, and
  counted.
* Of the others, the newest `DROPPABLE_MAX` are kept; older ones are dropped and counted. While `IN_FLIGHT_MAX` ticks are not
  acknowledged they stay in this queue, because telemetry that is queued in the network would be outdated on arrival. Ticks
  without them are still sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from holdfast.domain.evolve import evolve
from holdfast.domain.signals import RELIABLE, KernelLine, NodeSignal, Tick

DROPPABLE_MAX = 2048
KERNEL_LINES_MAX = 1024
# Ticks, half of `IN_FLIGHT_MAX`; an acknowledgement of each tick would cost diagnostics as much as reading it.
ACK_EVERY = 8
IN_FLIGHT_MAX = 16
UNACKNOWLEDGED_MAX = 256  # ticks with reliable signals; beyond it, signals gather until an acknowledgement comes


class Outbox:
    """Composes ticks. `dropped` counts signals that were dropped since the start because the queue was full."""

    def __init__(self, node: str, incarnation: str) -> None:
        self._node, self._incarnation = node, incarnation
        self._seq = 0  # of the last tick
        self._reliable: deque[NodeSignal] = deque()
        self._droppable: deque[NodeSignal] = deque()
        self._unacknowledged: dict[int, Tick] = {}  # by seq, in order, with their reliable signals only
        self._acknowledged = 0  # the newest tick that was acknowledged on this stream
        self.dropped = 0

    @property
    def urgent(self) -> bool:
        """Whether a reliable signal has not been sent yet."""
        return bool(self._reliable)

    @property
    def wants_ack(self) -> bool:
        """Whether the tick just composed should request an acknowledgement.

        Every `ACK_EVERY`th tick requests an acknowledgement, also while none arrives, so that a slow receiver is not asked
        more often."""
        behind = self._seq - self._acknowledged
        return behind > 0 and behind % ACK_EVERY == 0

    @property
    def stalled(self) -> bool:
        """True if diagnostics does not keep up: a tick then contains only reliable signals."""
        return self._seq - self._acknowledged >= IN_FLIGHT_MAX

    def add(self, signal: NodeSignal) -> None:
        if not isinstance(signal, RELIABLE):
            self._keep(self._droppable, signal, DROPPABLE_MAX)
        elif (
            isinstance(signal, KernelLine)
            and sum(isinstance(s, KernelLine) for s in self._reliable) >= KERNEL_LINES_MAX
        ):
            self._reliable.remove(next(s for s in self._reliable if isinstance(s, KernelLine)))
            self.dropped += 1
            self._reliable.append(signal)
        else:
            self._reliable.append(signal)

    def _keep(self, queue: deque[NodeSignal], signal: NodeSignal, limit: int) -> None:
        if len(queue) == limit:
            queue.popleft()
            self.dropped += 1
        queue.append(signal)

    def compose(self, at: float, fresh: Iterable[NodeSignal] = (), *, lost: int = 0) -> Tick:
        """Compose the next tick from the queued signals that may be sent and `fresh`. Its number is new.

        `lost` counts signals that were dropped before the queue, since the start.
        """
        telemetry = () if self.stalled or not self._droppable else tuple(self._droppable)
        self._seq += 1
        reliable: tuple[NodeSignal, ...] = ()
        if self._reliable and len(self._unacknowledged) < UNACKNOWLEDGED_MAX:
            reliable, self._reliable = tuple(self._reliable), deque()
        signals = (*reliable, *telemetry, *fresh)
        for _ in telemetry:
            self._droppable.popleft()
        tick = Tick(self._node, self._incarnation, self._seq, at, signals, self.dropped + lost)
        if reliable:
            kept = tick if len(reliable) == len(signals) else evolve(tick, signals=reliable)
            self._unacknowledged[tick.seq] = kept
        return tick

    def acknowledge(self, seq: int) -> None:
        """Record that this tick and all before it have been processed and their findings stored."""
        self._acknowledged = max(seq, self._acknowledged)
        if self._unacknowledged:
            self._unacknowledged = {number: tick for number, tick in self._unacknowledged.items() if number > seq}

    def give_up_oldest(self) -> Tick | None:
        """Drop the oldest unacknowledged tick, which diagnostics rejected as malformed, so that it does not block the
        others."""
        if not self._unacknowledged:
            return None
        tick = self._unacknowledged.pop(min(self._unacknowledged))
        self.dropped += len(tick.signals)
        return tick

    def again(self) -> tuple[Tick, ...]:
        """Return the unacknowledged ticks, in order and with their numbers, for a new stream."""
        self._acknowledged = self._seq + 1 - ACK_EVERY  # no tick is in flight; the first requests an acknowledgement
        return tuple(self._unacknowledged.values())
