"""The set of this node's workers for the supervisor: which workers are running, and how the last ones exited.

The supervisor compares this set with what should run, so that it also notices a worker whose exit report was lost. The set has
a version number: while nothing changes, a heartbeat contains only the number. A changed set is a report, or part of the answer
to `Prepare`: with thousands of nodes, the answers are then all that a supervisor receives."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import anyio

from holdfast.agent.workers.worker import Exit, Worker
from holdfast.domain.nodes import RunningWorker, TemplateState, WorkerEnded
from holdfast.domain.orders import WorkersChanged

GATHER_S = 0.2  # a generation that starts or ends is one report, not one per rank
ENDED_MAX = 256


class WorkerSet:
    """`running` returns the running workers. `report` receives the report of a changed set."""

    def __init__(
        self,
        running: Callable[[], tuple[RunningWorker, ...]],
        report: Callable[[WorkersChanged], None],
        clock: Callable[[], float] = time.monotonic,
        template: Callable[[], TemplateState | None] = lambda: None,
    ) -> None:
        self._running, self._report, self._clock, self._template = running, report, clock, template
        self._template_seen: TemplateState | None = None
        self.version = 1
        self._ended: deque[tuple[float, WorkerEnded]] = deque(maxlen=ENDED_MAX)
        self._reported = 1  # an empty set needs no report: Hello carries it
        self._template_reported: TemplateState | None = None
        self._changed = anyio.Event()

    @property
    def ended(self) -> tuple[WorkerEnded, ...]:
        """The exits, with their present ages."""
        now = self._clock()
        return tuple(replace(ended, ago_s=now - at) for at, ended in self._ended)

    @property
    def template(self) -> TemplateState | None:
        """State of the worker template."""
        return self._template()

    def template_changed(self) -> None:
        """Check whether the state of the template has changed."""
        if (now := self._template()) != self._template_seen:
            self._template_seen = now
            self.changed()

    def changed(self) -> None:
        """Record that a worker was forked or has ended, or that the template has changed."""
        self.version += 1
        self._changed.set()

    def add_ended(self, worker: Worker, how: Exit) -> None:
        """Record the exit of a rank that was started and not ordered to stop."""
        identity = worker.identity
        ended = WorkerEnded(identity.job, identity.generation, identity.rank, how.exit_code, how.signal)
        self._ended.append((self._clock(), ended))

    def begin(self, job: str, generation: int) -> None:
        """Record that `generation` is being prepared on this node. Exits of older generations are dropped."""
        kept = [
            each for each in self._ended if (each[1].job, each[1].generation) == (job, generation) or each[1].job != job
        ]
        self._ended = deque(kept, maxlen=ENDED_MAX)

    def version_for_answer(self, forked: Sequence[RunningWorker]) -> int:
        """Return the version of the set if the answer to `Prepare`, with the `forked` workers, contains everything that a
        report would contain, and count the set as reported. Otherwise return 0; a report follows."""
        if self._ended or self._template() != self._template_reported or self._running() != tuple(forked):
            return 0
        self._reported = self.version
        return self.version

    async def run(self) -> None:
        """A loop for the pool's task group: reports each change, gathered over `GATHER_S`."""
        while True:
            await self._changed.wait()
            await anyio.sleep(GATHER_S)
            self._changed = anyio.Event()
            if self.version != self._reported:
                self._reported, self._template_reported = self.version, self._template()
                self._report(WorkersChanged(self.version, self._running(), self.ended, self._template_reported))
