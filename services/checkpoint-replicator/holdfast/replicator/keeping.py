"""Retains the checkpoints of finished jobs on this node, and deletes them after the retention period.

Checkpoints of an earlier run are never deleted to make room. They are deleted by `holdfast checkpoints prune`, or after
`retention_s` (0 = unlimited). The time is counted by the monotonic clock while this process runs, and stored. So neither a
clock that jumps nor a machine that was off for a week makes a checkpoint expire.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
import structlog

from holdfast.domain.errors import Unavailable
from holdfast.replicator.engine import Engine
from holdfast.replicator.jobs import Job

log = structlog.get_logger("holdfast.replicator")

LOOKS = 1000  # within the retention period
LOOK_S_MAX = 600.0  # a killed replicator loses at most this much of the counted time and retains checkpoints longer


class Keeper:
    """Counts the retention time and deletes expired checkpoints. `idle`: as `Mover.idle`."""

    def __init__(self, engine: Engine, idle: Callable[[str], Awaitable[None]], retention_s: float) -> None:
        self._engine = engine
        self._idle = idle
        self._retention_s = retention_s

    async def run(self) -> None:
        """Never returns."""
        while True:
            before = anyio.current_time()
            await anyio.sleep(
                min(LOOK_S_MAX, max(self._retention_s / LOOKS, 0.01)) if self._retention_s else LOOK_S_MAX
            )
            await self.look(anyio.current_time() - before)

    async def look(self, elapsed_s: float) -> None:
        """Add `elapsed_s` to the ages of all jobs and delete what has expired."""
        for job in list(self._engine.jobs.values()):
            if not job.kept.ages_s:
                continue
            before = job.kept.expired_before
            job.kept.grow_older(elapsed_s, self._retention_s)
            if job.kept.expired_before > before:
                await self._expired(job)
            if not job.gone:
                await self._engine.remember(job)

    async def _expired(self, job: Job) -> None:
        log.info(
            "retention expired", job=job.name, attempts_before=job.kept.expired_before, retention_s=self._retention_s
        )
        if job.ended and job.config is not None and job.config.attempt < job.kept.expired_before:
            with suppress(Unavailable):  # the engine has logged what is left
                await self._engine.forget(job.name, self._idle)
        else:
            self._engine.notify()  # the plan decides which shards of the job can be deleted
