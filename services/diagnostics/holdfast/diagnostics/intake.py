"""Intake: passes the ticks of agents to `ticks`, and its results to the publisher. The transport is in `ingest`.

`Receipt` states when a tick may be acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio
import structlog

from holdfast.diagnostics.engine import Engine, Folded
from holdfast.diagnostics.publisher import Publisher
from holdfast.diagnostics.ticks import (
    CALM_CLOCK_TICK_S,
    CLOCK_TICK_S,
    NodeStream,
    Receipt,
    Ticks,
    check,
)
from holdfast.domain import spans
from holdfast.domain.signals import Tick
from holdfast.domain.tracing import trace_id_of
from holdfast.runtime.telling import metrics, telemetry

log = structlog.get_logger("holdfast.diagnostics.intake")


class Intake:
    """The only caller of `Ticks`. Each method calls it between two awaits, so no lock is needed."""

    def __init__(self, engine: Engine, publisher: Publisher, *, clock: Callable[[], float]) -> None:
        self._ticks = Ticks(engine, self._publish)
        self._publisher = publisher
        self._clock = clock
        self._woken = anyio.Event()

    async def tick(self, stream: NodeStream, tick: Tick) -> Receipt:
        """Fold one tick. Raises `MalformedMessage` if the tick breaks a limit, and `Replaced` if the stream is obsolete."""
        check(stream, tick)
        await self._publisher.wait_for_room()
        opens = not stream.node
        receipt = self._ticks.take(stream, tick, self._clock())
        self._wake()
        if opens:
            log.info("node connected", node=tick.node, incarnation=tick.incarnation)
        if receipt.rejected:
            self._log_rejected(tick, receipt.rejected)
        return receipt

    def heard(self, stream: NodeStream) -> None:
        """Record a heartbeat for a tick that is folded later, so that its node does not count as silent."""
        self._ticks.heard(stream, self._clock())

    def close(self, stream: NodeStream, *, clean: bool) -> None:
        """Record the end of a stream. `clean`: the agent announced the end, or diagnostics refused the stream. Neither is a
        fault of the node."""
        if self._ticks.close(stream, self._clock(), clean=clean):
            self._wake()
            log.info("node disconnected", node=stream.node, clean=clean)

    async def watch_clock(self) -> None:
        """Fold clock ticks, in a loop for the service's task group.

        While no more findings can be buffered, no clock ticks are folded, because ticks of agents are not folded then either.
        """
        while True:
            await self._publisher.wait_for_room()
            now = self._clock()
            self._ticks.passed(now)
            if now < self._ticks.attentive_until:
                await anyio.sleep(CLOCK_TICK_S)
                continue
            self._woken = anyio.Event()
            with anyio.move_on_after(CALM_CLOCK_TICK_S):
                await self._woken.wait()

    def frozen(self, length_s: float) -> None:
        """Record that this process did not run for `length_s`. Detectors ignore silence in that interval."""
        self._ticks.frozen(length_s, self._clock())

    def _wake(self) -> None:
        """Let `watch_clock` fold clock ticks often, if a signal was folded that needs it."""
        if self._clock() < self._ticks.attentive_until:
            self._woken.set()

    def _log_rejected(self, tick: Tick, reasons: tuple[str, ...]) -> None:
        """Log the 1st, 2nd, 4th, 8th … rejection for each reason."""
        for reason in reasons:
            so_far = self._ticks.rejected[reason]
            if so_far.bit_count() == 1:
                log.warning("signal rejected", node=tick.node, seq=tick.seq, reason=reason, so_far=so_far)

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
