"""Current problems with a job's checkpoints on this node: the newest few, each logged once and counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from holdfast.domain.replication import Trouble, TroubleKind
from holdfast.runtime import metrics, telemetry

TROUBLES_MAX = 16  # per job
REASON_CHARS_MAX = 500
QUIET_S = 600.0

log = structlog.get_logger("holdfast.replicator")


class Troubles:
    """The problems of one job. `clock` returns Unix seconds."""

    def __init__(self, job: str, clock: Callable[[], float] = time.time) -> None:
        self._job = job
        self._clock = clock
        self._open: dict[tuple[TroubleKind, str], Trouble] = {}
        self._over: dict[tuple[TroubleKind, str], tuple[Trouble, float]] = {}  # with the start time

    def begin(self, kind: TroubleKind, place: str | Path, reason: str) -> bool:
        """Record a problem. Returns whether it is new. A problem that recurs is logged once."""
        key = (kind, str(place))
        if key in self._open:
            return False
        before, over_at = self._over.pop(key, (None, 0.0))
        if before is not None and self._clock() - over_at < QUIET_S:
            self._open[key] = before
            return True
        while len(self._open) >= TROUBLES_MAX:
            del self._open[next(iter(self._open))]
        trouble = Trouble(kind, str(place), reason[:REASON_CHARS_MAX], self._clock())
        self._open[key] = trouble
        log.error(
            "checkpoint trouble detected", job=self._job, kind=kind.value, place=trouble.place, reason=trouble.reason
        )
        telemetry.record(metrics.CHECKPOINT_TROUBLES, 1, job=self._job, kind=kind.value)
        return True

    def end(self, kind: TroubleKind, place: str | Path) -> bool:
        """End a problem. Returns whether there was one."""
        trouble = self._open.pop((kind, str(place)), None)
        if trouble is not None:
            while len(self._over) >= TROUBLES_MAX:
                del self._over[next(iter(self._over))]
            self._over[kind, str(place)] = (trouble, self._clock())
            log.info("checkpoint trouble resolved", job=self._job, kind=kind.value, place=trouble.place)
        return trouble is not None

    def places(self, kind: TroubleKind) -> frozenset[str]:
        return frozenset(place for each, place in self._open if each is kind)

    def all(self) -> tuple[Trouble, ...]:
        """Return the problems, oldest first."""
        return tuple(self._open.values())
