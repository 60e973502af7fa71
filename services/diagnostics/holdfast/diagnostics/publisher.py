"""Writes findings to the event log immediately, and finished steps in small batches.

Findings are never dropped. While the event log is not available, findings wait here. `wait_published` then delays the
acknowledgements of the ticks that the findings came from. While `findings_max` findings wait, `wait_for_room` delays the
folding of further ticks. Steps are telemetry: beyond `steps_max`, the oldest steps are dropped and counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import anyio
import structlog

from holdfast.domain.errors import Unavailable
from holdfast.domain.findings import Finding, StepRecord
from holdfast.log.names import FINDINGS, STEPS
from holdfast.log.protocol import Entry, EventLog
from holdfast.runtime.rpc.backoff import Backoff
from holdfast.wire.events import finding_entry, step_entries

_BATCH_MAX = 256

log = structlog.get_logger("holdfast.diagnostics.publisher")


class Publisher:
    """Buffer between the fold, which must not block, and the event log, which may block."""

    def __init__(
        self,
        event_log: EventLog,
        *,
        clock: Callable[[], float],
        findings_max: int = 10_000,
        steps_max: int = 100_000,
        steps_every_s: float = 0.5,
    ) -> None:
        self._log = event_log
        self._clock = clock  # of the times of the steps, Unix seconds
        self._findings: deque[tuple[float, Finding]] = deque()  # (time of the event loop at `offer`, finding)
        self._findings_max = findings_max
        self._steps: deque[StepRecord] = deque(maxlen=steps_max)
        self._steps_every_s = steps_every_s
        self._findings_offered = anyio.Event()
        self._steps_offered = anyio.Event()
        self._progress = anyio.Event()  # set, and replaced, whenever findings have been published
        self.offered = 0  # findings, since the start
        self.published = 0
        self.steps_dropped = 0

    def offer(self, findings: Sequence[Finding], steps: Sequence[StepRecord]) -> None:
        """Buffer the findings and steps of a fold. Never blocks; callers await `wait_for_room` before they fold more.

        While findings wait, a repeat of a finding is not buffered, because the finding will be repeated again.
        """
        findings = [finding for finding in findings if not (finding.repeat and self._findings)]
        if findings:
            now_s = anyio.current_time()
            self._findings.extend((now_s, finding) for finding in findings)
            self.offered += len(findings)
            self._findings_offered.set()
        if steps:
            assert self._steps.maxlen is not None
            self.steps_dropped += max(0, len(self._steps) + len(steps) - self._steps.maxlen)
            self._steps.extend(steps)
            self._steps_offered.set()

    async def wait_for_room(self) -> None:
        """Wait while the buffer of findings is full."""
        while len(self._findings) >= self._findings_max:
            await self._progress.wait()

    async def wait_published(self, count: int) -> None:
        """Wait until the first `count` findings that were offered are in the event log."""
        while self.published < count:
            await self._progress.wait()

    async def publish_findings(self) -> None:
        """Publish findings, in a loop for the service's task group. Ends only by an exception."""
        while True:
            await self._findings_offered.wait()
            self._findings_offered = anyio.Event()
            while self._findings:
                batch = [self._findings[i] for i in range(min(_BATCH_MAX, len(self._findings)))]
                await self._append(FINDINGS, partial(_dated, batch))
                for _ in batch:
                    self._findings.popleft()
                self.published += len(batch)
                self._progress.set()
                self._progress = anyio.Event()

    async def publish_steps(self) -> None:
        """Publish finished steps, in a loop for the service's task group. Ends only by an exception."""
        while True:
            await self._steps_offered.wait()
            await anyio.sleep(self._steps_every_s)  # collects a batch; steps are not urgent
            self._steps_offered = anyio.Event()
            batch = [self._steps.popleft() for _ in range(len(self._steps))]
            batch.sort(key=lambda record: (record.job, record.generation, record.world_size, record.step))
            await self._append(STEPS, partial(self._entries_of_steps, batch))

    def _entries_of_steps(self, batch: Sequence[StepRecord]) -> list[Entry]:
        return step_entries(batch, self._clock())

    async def _append(self, stream: str, entries: Callable[[], Sequence[Entry]]) -> None:
        """Append `entries()` and retry until the event log accepts them; `entries` is called for each attempt. An attempt with
        an unknown outcome is repeated, because readers recognise repeated entries by their id."""
        backoff, tries = Backoff(), 0
        while True:
            try:
                await self._log.append(stream, *entries())
            except Unavailable as error:
                tries += 1
                if tries == 1:
                    log.warning("event log unavailable, entries kept", stream=stream, reason=str(error))
                await backoff.sleep()
            else:
                if tries:
                    log.info("event log available again", stream=stream, tries=tries + 1)
                return


def _dated(concluded: Sequence[tuple[float, Finding]]) -> list[Entry]:
    """The entries of findings. Each contains the time for which its finding has waited in this buffer."""
    now_s = anyio.current_time()
    return [finding_entry(replace(finding, waited_s=finding.waited_s + now_s - at_s)) for at_s, finding in concluded]
