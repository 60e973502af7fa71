"""What waits to be told to diagnostics: two buffers with two promises. Pure.

* Signals of `RELIABLE` types are kept until the tick that carried them is acknowledged, and go out again on a new stream, under
  the same tick number, so that diagnostics knows a repeat. Only a flood of kernel lines is cut, oldest first, and counted.
* The rest is the newest `DROPPABLE_MAX` signals; older ones are dropped and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from holdfast.domain.signals import RELIABLE, KernelLine, NodeSignal, Tick

DROPPABLE_MAX = 2048
KERNEL_LINES_MAX = 1024
UNACKNOWLEDGED_MAX = 256  # ticks with reliable signals; beyond it, signals gather until an acknowledgement comes


class Outbox:
    """Composes ticks. `dropped` counts signals lost for want of room since the start."""

    def __init__(self, node: str, incarnation: str) -> None:
        self._node, self._incarnation = node, incarnation
        self._seq = 0
        self._reliable: deque[NodeSignal] = deque()
        self._droppable: deque[NodeSignal] = deque()
        self._unacknowledged: dict[int, Tick] = {}  # by seq, in order, with their reliable signals only
        self.dropped = 0

    @property
    def urgent(self) -> bool:
        """Something reliable waits for its first tick."""
        return bool(self._reliable)

    @property
    def settled(self) -> bool:
        """Every reliable signal has been acknowledged."""
        return not self._reliable and not self._unacknowledged

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
        """The next tick: everything that waits, and `fresh`. Its number has not been used before.

        `lost` counts what was dropped before it came here, since the start.
        """
        self._seq += 1
        reliable: tuple[NodeSignal, ...] = ()
        if len(self._unacknowledged) < UNACKNOWLEDGED_MAX:
            reliable, self._reliable = tuple(self._reliable), deque()
        signals = (*reliable, *self._droppable, *fresh)
        self._droppable.clear()
        tick = Tick(self._node, self._incarnation, self._seq, at, signals, self.dropped + lost)
        if reliable:
            self._unacknowledged[tick.seq] = replace(tick, signals=reliable)
        return tick

    def acknowledge(self, seq: int) -> None:
        """This tick and all before it have been folded, and what they led to is safe."""
        self._unacknowledged = {number: tick for number, tick in self._unacknowledged.items() if number > seq}

    def give_up_oldest(self) -> Tick | None:
        """Drop the oldest unacknowledged tick: diagnostics calls it malformed, and it would block all others for ever."""
        if not self._unacknowledged:
            return None
        tick = self._unacknowledged.pop(min(self._unacknowledged))
        self.dropped += len(tick.signals)
        return tick

    def again(self) -> tuple[Tick, ...]:
        """What a new stream has to be told first: unacknowledged ticks, in order, under their own numbers."""
        return tuple(self._unacknowledged.values())
