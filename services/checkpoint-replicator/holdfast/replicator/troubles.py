"""What is wrong with a job's checkpoints on this node: the newest few, each said once in the log and counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from holdfast.domain.replication import Trouble, TroubleKind
from holdfast.runtime import metrics, telemetry

TROUBLES_MAX = 16  # of a job
REASON_CHARS_MAX = 500

log = structlog.get_logger("holdfast.replicator")


class Troubles:
    """Of one job. `clock` is Unix seconds."""

    def __init__(self, job: str, clock: Callable[[], float] = time.time) -> None:
        self._job = job
        self._clock = clock
        self._open: dict[tuple[TroubleKind, str], Trouble] = {}

    def begin(self, kind: TroubleKind, place: str | Path, reason: str) -> bool:
        """Whether it is new."""
        key = (kind, str(place))
        if key in self._open:
            return False
        while len(self._open) >= TROUBLES_MAX:
            del self._open[next(iter(self._open))]
        trouble = Trouble(kind, str(place), reason[:REASON_CHARS_MAX], self._clock())
        self._open[key] = trouble
        log.error(
            "checkpoints are in trouble", job=self._job, kind=kind.value, place=trouble.place, reason=trouble.reason
        )
        telemetry.record(metrics.CHECKPOINT_TROUBLES, 1, job=self._job, kind=kind.value)
        return True

    def end(self, kind: TroubleKind, place: str | Path) -> bool:
        """Whether there was such a trouble."""
        trouble = self._open.pop((kind, str(place)), None)
        if trouble is not None:
            log.info("trouble is over", job=self._job, kind=kind.value, place=trouble.place)
        return trouble is not None

    def places(self, kind: TroubleKind) -> frozenset[str]:
        return frozenset(place for each, place in self._open if each is kind)

    def all(self) -> tuple[Trouble, ...]:
        """Oldest first."""
        return tuple(self._open.values())
