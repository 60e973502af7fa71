"""Telemetry streams from production's `Outbox` of each agent to diagnostics, which recognises repetitions by production's
`SeqWindow`. And the promise about them: diagnostics takes each signal once, also if a stream fails with ticks that it has not
read, or that it has not acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.agent.outbox import Outbox
from holdfast.diagnostics.seq_window import SeqWindow
from holdfast.domain.signals import KernelLine, Tick
from holdfast.sim.agent import Agent
from holdfast.sim.world import Violation, World

RECONNECT_S = (0.1, 5.0)  # an agent's back-off
ACKNOWLEDGED_S = (0.001, 2.0)  # when the findings are published


@dataclass(eq=False, slots=True)
class _Stream:
    """Of one incarnation of an agent. A stream that fails is replaced; the numbers of the ticks continue."""

    agent: Agent
    incarnation: str
    outbox: Outbox
    open: bool = True  # as the agent knows
    number: int = 1
    emitted: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)  # by diagnostics
    window: SeqWindow = field(default_factory=SeqWindow)  # of diagnostics, lost when it restarts, as `read`
    read: set[str] = field(default_factory=set)

    @property
    def ended(self) -> bool:
        return not self.agent.alive or self.agent.incarnation != self.incarnation


class Telemetry:
    """`up`: whether diagnostics reads. `take` receives the text of each signal that diagnostics reads for the first time."""

    def __init__(self, world: World, up: Callable[[], bool], take: Callable[[str], None]) -> None:
        self._world, self._up, self._take = world, up, take
        self._streams: dict[str, _Stream] = {}  # by incarnation

    def emit(self, agent: Agent, text: str) -> None:
        """Send a signal from an agent. If the agent ends before diagnostics has read it, it is lost."""
        life = agent.incarnation
        stream = self._streams.setdefault(life, _Stream(agent, life, Outbox(agent.name, life)))
        stream.emitted.add(text)
        stream.outbox.add(KernelLine(agent.name, agent.clock.now(), text))
        if stream.open:
            self._write(stream, ())

    def restarted(self) -> None:
        """Diagnostics has lost its state and its streams."""
        for stream in self._streams.values():
            stream.window = SeqWindow()
            stream.read.clear()
            self._fail(stream)

    def _fail(self, stream: _Stream) -> None:
        if stream.open:
            stream.open = False
            self._world.after(self._world.spite.uniform(*RECONNECT_S), lambda: self._reconnect(stream))

    def _reconnect(self, stream: _Stream) -> None:
        if stream.ended:
            return
        stream.open = True
        if not self._reads(stream):
            self._fail(stream)
            return
        stream.number += 1
        self._write(stream, stream.outbox.again())

    def _reads(self, stream: _Stream) -> bool:
        return self._up() and not stream.agent.telemetry_cut

    def _write(self, stream: _Stream, again: tuple[Tick, ...]) -> None:
        """Write what was not acknowledged, and the next tick. A stream that is cut loses the tick, and fails."""
        ticks = (*again, stream.outbox.compose(stream.agent.clock.now()))
        if not self._reads(stream):
            self._fail(stream)
            return
        for tick in ticks:
            self._read(stream, tick)
        if missing := stream.emitted - stream.taken:
            raise Violation(
                f"{stream.agent.name} does not send {sorted(missing)} again, which diagnostics has not read"
            )
        number = stream.number

        def acknowledge() -> None:
            if stream.open and stream.number == number and self._reads(stream):
                stream.outbox.acknowledge(ticks[-1].seq)

        self._world.after(self._world.spite.uniform(*ACKNOWLEDGED_S), acknowledge)

    def _read(self, stream: _Stream, tick: Tick) -> None:
        if not stream.window.add(tick.seq):
            return
        for signal in tick.signals:
            assert isinstance(signal, KernelLine)
            if signal.text in stream.read:
                raise Violation(f"diagnostics takes the signal {signal.text} of {stream.agent.name} twice")
            stream.read.add(signal.text)
            stream.taken.add(signal.text)
            self._take(signal.text)
