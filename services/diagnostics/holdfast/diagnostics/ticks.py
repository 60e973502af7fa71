"""Folds the ticks of agents, and the passing of time, into the engine. Pure: no clock and no I/O.

A tick is folded once per (node, incarnation, seq), however often it is sent. The start of a stream, each tick and the end of a
stream are also folded as signals, which the `liveness` detector reads. `intake` puts this class behind an event loop; the
simulator calls it in virtual time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.exit_cause import is_failure
from holdfast.diagnostics.engine import Engine, Folded
from holdfast.diagnostics.plausible import Plausibility
from holdfast.diagnostics.seq_window import SeqWindow
from holdfast.domain.clocks import OtherClock
from holdfast.domain.construct import constructor_of
from holdfast.domain.errors import MalformedMessage
from holdfast.domain.signals import (
    RELIABLE,
    ClockTick,
    GenerationStarted,
    GpuHealth,
    GpuSample,
    HostSample,
    KernelLine,
    NicSample,
    NodeBeat,
    NodeConnected,
    NodeDisconnected,
    NodeSignal,
    ObservedSteps,
    RankProgress,
    Signal,
    StepColumns,
    Tick,
    WorkerError,
    WorkerExited,
)

# Detectors that delay a conclusion (about an exit or a broken stream) need a clock tick every 20 ms. While only routine
# telemetry arrives, a clock tick every 250 ms is enough, at a tenth of the cost. `ATTENTION_S` is longer than all delays of
# less than a second.
CLOCK_TICK_S = 0.02
CALM_CLOCK_TICK_S = 0.25
ATTENTION_S = 2.0
_ROUTINE = frozenset(
    {ClockTick, NodeBeat, StepColumns, ObservedSteps, RankProgress, HostSample, GpuSample, GpuHealth, NicSample}
)
_MUST_HOLD = frozenset(RELIABLE)
# A detector may delay its conclusion about an exit. The tick is acknowledged only afterwards, so that a crash of this process
# during the delay does not lose the exit.
SETTLE_S = 0.5
_WORLD_MAX = 1_000_000  # ranks of one generation; detectors allocate memory for each, so a larger mesh is rejected
_NODES_MAX = 50_000  # disconnected nodes that are kept
# Limits of texts that are copied to findings, to Redis and to terminals. Agents send at most a fraction of these sizes.
_LINE_CHARS_MAX = 16 << 10
_TAIL_CHARS_MAX = 256 << 10
_CALLS_MAX = 4096


@dataclass(eq=False, slots=True)
class NodeStream:
    """One open telemetry stream. `node` is empty until its first tick."""

    node: str = ""
    incarnation: str = ""
    seqs: SeqWindow = field(default_factory=SeqWindow)  # of the incarnation, over all its streams
    clock: OtherClock = field(default_factory=OtherClock)  # of the agent, likewise
    goodbye: bool = False  # the agent's last tick announced that the agent ends on purpose


@dataclass(frozen=True, slots=True)
class Receipt:
    """A folded tick. The tick may be acknowledged after `settle_s`, when the findings that follow from it are published."""

    seq: int
    must_hold: bool  # the tick contains a signal that the agent repeats until the tick is acknowledged
    settle_s: float
    rejected: tuple[str, ...] = ()  # for each signal that cannot be true: the reason


_beat: Callable[..., NodeBeat] = constructor_of(NodeBeat)
_receipt: Callable[..., Receipt] = constructor_of(Receipt)


class Replaced(Exception):
    """The stream is obsolete: its node has opened another stream since."""


class Ticks:
    """The only caller of the engine. `publish` receives the result of every fold.

    `attentive_until`: until then the caller is to fold a clock tick every `CLOCK_TICK_S`. `rejected`: as in `Plausibility`.
    """

    def __init__(self, engine: Engine, publish: Callable[[Folded], None]) -> None:
        self._engine = engine
        self._publish = publish
        self._streams: dict[str, NodeStream] = {}
        self._closed: Bounded[str, NodeStream] = Bounded(_NODES_MAX)  # by node: the last stream that was closed
        self._plausibility = Plausibility()
        self.rejected = self._plausibility.rejected
        self.attentive_until = 0.0

    def is_open(self, stream: NodeStream) -> bool:
        return bool(stream.node) and self._streams.get(stream.node) is stream

    def take(self, stream: NodeStream, tick: Tick, now: float) -> Receipt:
        """Fold one tick that `check` has accepted. Raises `Replaced` if the stream is obsolete."""
        if not stream.node:
            self._open(stream, tick, now)
        elif self._streams.get(stream.node) is not stream:
            raise Replaced(f"node {stream.node} has opened another stream")
        stream.clock.saw(tick.at, now)
        self._fold(_beat(tick.node, now), now)
        impossible: tuple[str, ...] = ()
        if stream.seqs.add(tick.seq):
            signals, impossible = self._plausibility.screen(tick.signals)
            for signal in signals:
                self._fold(_in_our_time(signal, stream.clock), now)
        must_hold = not _MUST_HOLD.isdisjoint(map(type, tick.signals))
        failed = must_hold and any(isinstance(s, WorkerExited) and is_failure(s) for s in tick.signals)
        return _receipt(tick.seq, must_hold, SETTLE_S if failed else 0.0, impossible)

    def heard(self, stream: NodeStream, now: float) -> None:
        """Record a heartbeat for a tick that is folded later, so that its node does not count as silent."""
        if self.is_open(stream):
            self._fold(NodeBeat(stream.node, now), now)

    def close(self, stream: NodeStream, now: float, *, clean: bool) -> bool:
        """Record the end of a stream, and return whether it was open. `clean`: the agent announced the end, or diagnostics
        refused the stream. Neither is a fault of the node."""
        if not self.is_open(stream):
            return False
        self._closed[stream.node] = self._streams.pop(stream.node)
        self._fold(NodeDisconnected(stream.node, now, clean=clean), now)
        return True

    def passed(self, now: float) -> None:
        """Fold a clock tick. Detectors conclude from silence only at clock ticks."""
        self._fold(ClockTick(now), now)

    def frozen(self, length_s: float, now: float) -> None:
        """Record that this process did not run for `length_s`. Detectors ignore silence in that interval."""
        self._publish(self._engine.gap(length_s, now))

    def _open(self, stream: NodeStream, tick: Tick, now: float) -> None:
        stream.node, stream.incarnation = tick.node, tick.incarnation
        earlier = self._streams.get(tick.node) or self._closed.pop(tick.node, None)
        if earlier is not None and earlier.incarnation == tick.incarnation:
            stream.seqs, stream.clock = earlier.seqs, earlier.clock
        self._streams[tick.node] = stream
        self._fold(NodeConnected(tick.node, now, tick.incarnation), now)

    def _fold(self, signal: Signal, now: float) -> None:
        if type(signal) not in _ROUTINE:
            self.attentive_until = now + ATTENTION_S
        self._publish(self._engine.fold(signal, now))


def _in_our_time(signal: NodeSignal, clock: OtherClock) -> NodeSignal:
    """Steps are combined over all nodes of a job, and published. Their times therefore become those of our clock."""
    if not clock.ahead_s or not isinstance(signal, StepColumns | ObservedSteps):
        return signal
    started_at, ended_at = tuple(map(clock.ours, signal.started_at)), tuple(map(clock.ours, signal.ended_at))
    return replace(signal, at=clock.ours(signal.at), started_at=started_at, ended_at=ended_at)


def check(stream: NodeStream, tick: Tick) -> None:
    """Check that all ticks of a stream are from one incarnation of one node, and that sizes are within limits. Raises
    `MalformedMessage`."""
    if stream.node and (tick.node, tick.incarnation) != (stream.node, stream.incarnation):
        raise MalformedMessage(
            "tick.node",
            f"{tick.node!r} ({tick.incarnation!r}) on the stream of {stream.node!r} ({stream.incarnation!r}); "
            "one stream carries the ticks of one incarnation of one node",
        )
    for signal in tick.signals:
        match signal:
            case GenerationStarted():
                _check_generation(signal)
            case KernelLine() if len(signal.text) > _LINE_CHARS_MAX:
                raise MalformedMessage("kernel_lines.text", f"{len(signal.text)} characters; at most {_LINE_CHARS_MAX}")
            case WorkerExited() if (length := sum(map(len, signal.log_tail))) > _TAIL_CHARS_MAX:
                raise MalformedMessage("worker_exited.log_tail", f"{length} characters; at most {_TAIL_CHARS_MAX}")
            case WorkerExited(error=WorkerError(call_group=calls)) if len(calls) > _CALLS_MAX:
                raise MalformedMessage("worker_exited.error.call_group", f"{len(calls)} calls; at most {_CALLS_MAX}")
            case _:
                pass


def _check_generation(signal: GenerationStarted) -> None:
    size, hang = signal.mesh.world_size, signal.hang
    if size > _WORLD_MAX:
        raise MalformedMessage("generation_started.mesh", f"{size} ranks; at most {_WORLD_MAX}")
    if signal.ranks and max(signal.ranks) >= size:
        raise MalformedMessage("generation_started.ranks", f"rank {max(signal.ranks)} of a mesh of {size}")
    if not (hang.floor_s > 0 and hang.factor >= 1 and hang.init_s > 0):
        raise MalformedMessage("generation_started.hang", f"{hang}: needs floor_s > 0, factor ≥ 1, init_s > 0")
    if not 0.0 <= signal.warning_settles_s < math.inf:
        raise MalformedMessage("generation_started.warning_settles_s", f"{signal.warning_settles_s} is not a duration")
