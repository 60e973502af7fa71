"""Current problems with a job's checkpoints on this node: the newest few, each logged once and counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from holdfast.domain.replication import Trouble, TroubleKind
from holdfast.runtime.telling import metrics, telemetry

TROUBLES_MAX = 16  # per job
REASON_CHARS_MAX = 500
QUIET_S = 600.0
DISPLACED_MAX = 4096
_FILES = (TroubleKind.SET_ASIDE, TroubleKind.LEFT_ALONE)

log = structlog.get_logger("holdfast.replicator")


class Troubles:
    """The problems of one job. `clock` returns Unix seconds."""

    def __init__(self, job: str, clock: Callable[[], float] = time.time) -> None:
        self._job = job
        self._clock = clock
        self._open: dict[tuple[TroubleKind, str], Trouble] = {}
        self._displaced: dict[tuple[TroubleKind, str], None] = {}  # logged, current, and not among the newest
        self._over: dict[tuple[TroubleKind, str], tuple[Trouble, float]] = {}  # with the start time

    def begin(self, kind: TroubleKind, place: str | Path, reason: str) -> bool:
        """Record a problem. Returns whether it is new. A problem that recurs is logged once."""
        key = (kind, str(place))
        if key in self._open or key in self._displaced:
            return False
        before, over_at = self._over.pop(key, (None, 0.0))
        if before is not None and self._clock() - over_at < QUIET_S:
            self._open[key] = before
            return True
        while len(self._open) >= TROUBLES_MAX:
            self._displace()
        trouble = Trouble(kind, _text(place), _text(reason)[:REASON_CHARS_MAX], self._clock())
        self._open[key] = trouble
        log.error(
            "checkpoint trouble detected", job=self._job, kind=kind.value, place=trouble.place, reason=trouble.reason
        )
        telemetry.record(metrics.CHECKPOINT_TROUBLES, 1, job=self._job, kind=kind.value)
        return True

    def end(self, kind: TroubleKind, place: str | Path) -> bool:
        """End a problem. Returns whether there was one."""
        self._displaced.pop((kind, str(place)), None)
        trouble = self._open.pop((kind, str(place)), None)
        if trouble is not None:
            while len(self._over) >= TROUBLES_MAX:
                del self._over[next(iter(self._over))]
            self._over[kind, str(place)] = (trouble, self._clock())
            log.info("checkpoint trouble resolved", job=self._job, kind=kind.value, place=trouble.place)
        return trouble is not None

    def _displace(self) -> None:
        """Make room. The oldest problem of a file goes first, because nothing more happens to the file."""
        victim = next((key for key in self._open if key[0] in _FILES), next(iter(self._open)))
        del self._open[victim]
        while len(self._displaced) >= DISPLACED_MAX:
            del self._displaced[next(iter(self._displaced))]
        self._displaced[victim] = None

    def places(self, kind: TroubleKind) -> frozenset[str]:
        return frozenset(place for each, place in (*self._open, *self._displaced) if each is kind)

    def all(self) -> tuple[Trouble, ...]:
        """Return the problems, oldest first."""
        return tuple(self._open.values())


def _text(value: str | Path) -> str:
    """Return valid Unicode text, because a file name may contain bytes that are not valid UTF-8."""
    return str(value).encode(errors="backslashreplace").decode()
