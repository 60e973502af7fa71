"""What diagnostics writes to the event log: findings at once, finished steps in small batches.

Findings are never dropped. While the log is down they wait here; `wait_published` holds back the acknowledgements of the
ticks that they came from, and when `findings_max` of them wait, `wait_for_room` holds back the ticks themselves. Steps are
telemetry: the oldest are dropped and counted.
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
from holdfast.runtime.backoff import Backoff
from holdfast.wire.events import finding_entry, step_entries

_BATCH_MAX = 256

log = structlog.get_logger("holdfast.diagnostics.publisher")


class Publisher:
    """Buffers between the fold, which must not wait, and the log, which may."""

    def __init__(
        self,
        event_log: EventLog,
        *,
        findings_max: int = 10_000,
        steps_max: int = 100_000,
        steps_every_s: float = 0.5,
    ) -> None:
        self._log = event_log
        self._findings: deque[tuple[float, Finding]] = deque()  # with the loop's time of the conclusion
        self._findings_max = findings_max
        self._steps: deque[StepRecord] = deque(maxlen=steps_max)
        self._steps_every_s = steps_every_s
        self._news = anyio.Event()
        self._step_news = anyio.Event()
        self._progress = anyio.Event()  # set, and replaced, whenever findings have been published
        self.offered = 0  # findings, since the start
        self.published = 0
        self.steps_dropped = 0

    def offer(self, findings: Sequence[Finding], steps: Sequence[StepRecord]) -> None:
        """Take what a fold produced. Never waits; callers ask `wait_for_room` before they fold more.

        What is only said again is not kept for a log that is away: it will be said once more.
        """
        findings = [finding for finding in findings if not (finding.repeat and self._findings)]
        if findings:
            now_s = anyio.current_time()
            self._findings.extend((now_s, finding) for finding in findings)
            self.offered += len(findings)
            self._news.set()
        if steps:
            assert self._steps.maxlen is not None
            self.steps_dropped += max(0, len(self._steps) + len(steps) - self._steps.maxlen)
            self._steps.extend(steps)
            self._step_news.set()

    async def wait_for_room(self) -> None:
        """Returns at once unless the buffer of findings is full."""
        while len(self._findings) >= self._findings_max:
            await self._progress.wait()

    async def wait_published(self, count: int) -> None:
        """Until the first `count` findings that were offered are in the log."""
        while self.published < count:
            await self._progress.wait()

    async def publish_findings(self) -> None:
        """A loop for the service's task group. Ends by an exception only."""
        while True:
            await self._news.wait()
            self._news = anyio.Event()
            while self._findings:
                batch = [self._findings[i] for i in range(min(_BATCH_MAX, len(self._findings)))]
                await self._append(FINDINGS, partial(_dated, batch))
                for _ in batch:
                    self._findings.popleft()
                self.published += len(batch)
                self._progress.set()
                self._progress = anyio.Event()

    async def publish_steps(self) -> None:
        """A loop for the service's task group. Ends by an exception only."""
        while True:
            await self._step_news.wait()
            await anyio.sleep(self._steps_every_s)  # gathers a batch; nothing urgent travels here
            self._step_news = anyio.Event()
            batch = [self._steps.popleft() for _ in range(len(self._steps))]
            batch.sort(key=lambda record: (record.job, record.generation, record.world_size, record.step))
            await self._append(STEPS, partial(step_entries, batch))

    async def _append(self, stream: str, entries: Callable[[], Sequence[Entry]]) -> None:
        """Append `entries()`, made anew for every try, for ever if need be. A try that failed in doubt is repeated: readers
        know entries by their id."""
        backoff, tries = Backoff(), 0
        while True:
            try:
                await self._log.append(stream, *entries())
            except Unavailable as error:
                tries += 1
                if tries == 1:
                    log.warning("the event log is away: entries wait", stream=stream, reason=str(error))
                await backoff.sleep()
            else:
                if tries:
                    log.info("the event log is back", stream=stream, tries=tries + 1)
                return


def _dated(concluded: Sequence[tuple[float, Finding]]) -> list[Entry]:
    """With how long each has waited here by now."""
    now_s = anyio.current_time()
    return [finding_entry(replace(finding, waited_s=finding.waited_s + now_s - at_s)) for at_s, finding in concluded]
