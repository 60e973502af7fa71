"""What those who ask are shown: the state, the processes behind its ranks, and the newest finished steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import anyio

from holdfast.domain.findings import StepRecord
from holdfast.domain.nodes import RunningWorker
from holdfast.domain.orders import Hello, OrderDone
from holdfast.log.names import LEADER_LEASE
from holdfast.log.protocol import FencedLog
from holdfast.supervisor import snapshot
from holdfast.supervisor.core import State
from holdfast.supervisor.protocol import NodeReported

RECENT_STEPS_MAX = 32  # per job: what a rate is taken over
JOBS_MAX = 1000
NODES_MAX = 100_000
SNAPSHOT_AGE_MAX_S = 0.2  # a standby's picture is this old at most


class Workers:
    """Which process runs which rank, from what agents report. A new leader hears it again in each node's Hello."""

    def __init__(self) -> None:
        self._by_node: dict[str, tuple[RunningWorker, ...]] = {}

    def tell(self, event: NodeReported) -> None:
        match event.report:
            case Hello(running=running):
                self._by_node[event.node] = running
            case OrderDone(workers=workers) if workers:
                jobs = {worker.job for worker in workers}
                others = (each for each in self._by_node.get(event.node, ()) if each.job not in jobs)
                self._by_node[event.node] = (*others, *workers)
            case _:
                pass
        while len(self._by_node) > NODES_MAX:
            del self._by_node[next(iter(self._by_node))]

    def pid(self, node: str, job: str, generation: int, rank: int) -> int | None:
        for worker in self._by_node.get(node, ()):
            if (worker.job, worker.generation, worker.rank) == (job, generation, rank):
                return worker.pid
        return None


class Progress:
    """The newest finished steps of each job."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[StepRecord]] = {}

    def tell(self, steps: Iterable[StepRecord]) -> None:
        for step in steps:
            recent = self._recent.setdefault(step.job, deque(maxlen=RECENT_STEPS_MAX))
            if recent and recent[-1].generation != step.generation:
                recent.clear()  # a rate over a restart would be neither generation's
            recent.append(step)
        while len(self._recent) > JOBS_MAX:
            del self._recent[next(iter(self._recent))]

    def loss(self, job: str) -> float | None:
        return next((step.loss for step in reversed(self._recent.get(job, ())) if step.loss is not None), None)

    def step(self, job: str, generation: int, since: float) -> int:
        """The newest step of this generation that ended after `since`; 0 when there is none."""
        recent = self._recent.get(job, ())
        return max((s.step for s in recent if s.generation == generation and s.ended_at >= since), default=0)

    def tokens_per_s(self, job: str) -> float | None:
        return self._rate(job, lambda step: step.tokens)

    def steps_per_s(self, job: str) -> float | None:
        return self._rate(job, lambda _: 1)

    def _rate(self, job: str, worth: Callable[[StepRecord], int]) -> float | None:
        recent = self._recent.get(job)
        if not recent:
            return None
        seconds = recent[-1].ended_at - recent[0].started_at
        return sum(worth(step) for step in recent) / seconds if seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Picture:
    state: State
    workers: Workers = field(default_factory=Workers)
    leading: bool = False


Live = Callable[[], Picture | None]
Look = Callable[[], Awaitable[Picture | None]]


class Viewer:
    """The leader's own state when it leads; else the newest snapshot, which is as old as the last change."""

    def __init__(self, live: Live, log: FencedLog) -> None:
        self._live = live
        self._log = log
        self._snapshot: Picture | None = None
        self._read_at = -SNAPSHOT_AGE_MAX_S

    async def look(self) -> Picture | None:
        """None when there has never been a leader. Raises `Unavailable` when the log is away and this is no leader."""
        if (picture := self._live()) is not None:
            return picture
        if anyio.current_time() - self._read_at >= SNAPSHOT_AGE_MAX_S:
            parts = await self._log.snapshot(LEADER_LEASE)
            self._snapshot = Picture(snapshot.load(parts)) if parts else None
            self._read_at = anyio.current_time()
        return self._snapshot
