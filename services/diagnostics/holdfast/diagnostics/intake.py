"""Intake: passes the ticks of agents to the engine, in order. The transport is in `ingest`.

A tick is folded once per (node, incarnation, seq), however often it is sent. The start of a stream, each tick and the end of a
stream are also folded as signals, which the `liveness` detector reads. `Receipt` states when a tick may be acknowledged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import structlog

from holdfast.diagnostics.bounded import Bounded
from holdfast.diagnostics.detectors.exit_cause import is_failure
from holdfast.diagnostics.engine import Engine, Folded
from holdfast.diagnostics.plausible import Plausibility
from holdfast.diagnostics.publisher import Publisher
from holdfast.diagnostics.seq_window import SeqWindow
from holdfast.domain import spans
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
    ObservedSteps,
    RankProgress,
    Signal,
    StepColumns,
    Tick,
    WorkerError,
    WorkerExited,
)
from holdfast.domain.tracing import trace_id_of
from holdfast.runtime import metrics, telemetry

# Detectors that delay a conclusion (about an exit or a broken stream) need a clock tick every 20 ms. While only routine
# telemetry arrives, a clock tick every 250 ms is enough, at a tenth of the cost. `ATTENTION_S` is longer than all delays of
# less than a second.
CLOCK_TICK_S = 0.02
CALM_CLOCK_TICK_S = 0.25
ATTENTION_S = 2.0
_ROUTINE = (ClockTick, NodeBeat, StepColumns, ObservedSteps, RankProgress, HostSample, GpuSample, GpuHealth, NicSample)
# A detector may delay its conclusion about an exit. The tick is acknowledged only afterwards, so that a crash of this process
# during the delay does not lose the exit.
SETTLE_S = 0.5
_WORLD_MAX = 1_000_000  # ranks of one generation; detectors allocate memory for each, so a larger mesh is rejected
_NODES_MAX = 50_000  # disconnected nodes that are kept
# Limits of texts that are copied to findings, to Redis and to terminals. Agents send at most a fraction of these sizes.
_LINE_CHARS_MAX = 16 << 10
_TAIL_CHARS_MAX = 256 << 10
_CALLS_MAX = 4096

log = structlog.get_logger("holdfast.diagnostics.intake")


@dataclass(eq=False, slots=True)
class NodeStream:
    """One open telemetry stream. `node` is empty until its first tick."""

    node: str = ""
    incarnation: str = ""
    seqs: SeqWindow = field(default_factory=SeqWindow)  # of the incarnation, over all its streams
    goodbye: bool = False  # the agent's last tick announced that the agent ends on purpose


@dataclass(frozen=True, slots=True)
class Receipt:
    """A folded tick. The tick may be acknowledged after `settle_s`, when the findings that follow from it are published."""

    seq: int
    must_hold: bool  # the tick contains a signal that the agent repeats until the tick is acknowledged
    settle_s: float


class Replaced(Exception):
    """The stream is obsolete: its node has opened another stream since."""


class Intake:
    """The only caller of the engine. Each method calls the engine between two awaits, so no lock is needed."""

    def __init__(self, engine: Engine, publisher: Publisher, *, clock: Callable[[], float]) -> None:
        self._engine = engine
        self._publisher = publisher
        self._clock = clock
        self._streams: dict[str, NodeStream] = {}
        self._closed: Bounded[str, NodeStream] = Bounded(_NODES_MAX)  # by node: the last stream that was closed
        self._plausibility = Plausibility()
        self._attentive_until = 0.0
        self._woken = anyio.Event()

    async def tick(self, stream: NodeStream, tick: Tick) -> Receipt:
        """Fold one tick. Raises `MalformedMessage` if the tick breaks a limit, and `Replaced` if the stream is obsolete."""
        _check(stream, tick)
        await self._publisher.wait_for_room()
        if not stream.node:
            self._open(stream, tick)
        elif self._streams.get(stream.node) is not stream:
            raise Replaced(f"node {stream.node} has opened another stream")
        now = self._clock()
        self._fold(NodeBeat(tick.node, now), now)
        if stream.seqs.add(tick.seq):
            signals, impossible = self._plausibility.screen(tick.signals)
            for signal in signals:
                self._fold(signal, now)
            if impossible:
                self._log_rejected(tick, impossible)
        must_hold = any(isinstance(signal, RELIABLE) for signal in tick.signals)
        failed = must_hold and any(isinstance(s, WorkerExited) and is_failure(s) for s in tick.signals)
        return Receipt(tick.seq, must_hold, SETTLE_S if failed else 0.0)

    def heard(self, stream: NodeStream) -> None:
        """Record a heartbeat for a tick that is folded later, so that its node does not count as silent."""
        if stream.node and self._streams.get(stream.node) is stream:
            now = self._clock()
            self._fold(NodeBeat(stream.node, now), now)

    def close(self, stream: NodeStream, *, clean: bool) -> None:
        """Record the end of a stream. `clean`: the agent announced the end, or diagnostics refused the stream. Neither is a
        fault of the node."""
        if stream.node and self._streams.get(stream.node) is stream:
            self._closed[stream.node] = self._streams.pop(stream.node)
            now = self._clock()
            self._fold(NodeDisconnected(stream.node, now, clean=clean), now)
            log.info("node disconnected", node=stream.node, clean=clean)

    async def watch_clock(self) -> None:
        """Fold clock ticks, in a loop for the service's task group. Detectors conclude from silence only at clock ticks.

        While no more findings can be buffered, no clock ticks are folded, because ticks of agents are not folded then either.
        """
        while True:
            await self._publisher.wait_for_room()
            now = self._clock()
            self._fold(ClockTick(now), now)
            if now < self._attentive_until:
                await anyio.sleep(CLOCK_TICK_S)
                continue
            self._woken = anyio.Event()
            with anyio.move_on_after(CALM_CLOCK_TICK_S):
                await self._woken.wait()

    def frozen(self, length_s: float) -> None:
        """Record that this process did not run for `length_s`. Detectors ignore silence in that interval."""
        now = self._clock()
        self._publish(self._engine.gap(length_s, now))

    def _log_rejected(self, tick: Tick, reasons: tuple[str, ...]) -> None:
        """Log the 1st, 2nd, 4th, 8th … rejection for each reason."""
        for reason in reasons:
            so_far = self._plausibility.rejected[reason]
            if so_far.bit_count() == 1:
                log.warning("signal rejected", node=tick.node, seq=tick.seq, reason=reason, so_far=so_far)

    def _open(self, stream: NodeStream, tick: Tick) -> None:
        stream.node, stream.incarnation = tick.node, tick.incarnation
        earlier = self._streams.get(tick.node) or self._closed.pop(tick.node, None)
        if earlier is not None and earlier.incarnation == tick.incarnation:
            stream.seqs = earlier.seqs
        self._streams[tick.node] = stream
        now = self._clock()
        self._fold(NodeConnected(tick.node, now, tick.incarnation), now)
        log.info("node connected", node=tick.node, incarnation=tick.incarnation)

    def _fold(self, signal: Signal, now: float) -> None:
        if not isinstance(signal, _ROUTINE):
            self._attentive_until = now + ATTENTION_S
            self._woken.set()
        self._publish(self._engine.fold(signal, now))

    def _publish(self, folded: Folded) -> None:
        if folded.findings or folded.steps:
            self._publisher.offer(folded.findings, folded.steps)
        for finding in folded.findings:
            if finding.repeat:
                log.debug("finding repeated", id=finding.id, repeat=finding.repeat)
                continue
            telemetry.record(metrics.FINDINGS, 1, kind=finding.kind.value, severity=finding.severity.value)
            telemetry.write(spans.of_finding(finding))
            log.info(
                "finding",
                id=finding.id,
                kind=finding.kind.value,
                severity=finding.severity.value,
                job=finding.job,
                generation=finding.generation,
                node=finding.node,
                rank=finding.rank,
                summary=finding.summary,
                trace_id=trace_id_of(finding.traceparent),
            )


def _check(stream: NodeStream, tick: Tick) -> None:
    """Check that all ticks of a stream are from one incarnation of one node, and that sizes are within limits."""
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
