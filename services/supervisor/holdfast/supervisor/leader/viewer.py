"""What the API shows: the leader's own state, or the newest snapshot on a standby."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import anyio

from holdfast.log.names import LEADER_LEASE
from holdfast.log.protocol import FencedLog
from holdfast.supervisor.leader import snapshot
from holdfast.supervisor.picture import Live, Picture

SNAPSHOT_AGE_MAX_S = 0.2  # a standby's picture is this old at most


class Viewer:
    """The leader's own state, or, on a standby, the newest snapshot, which is as old as the last change."""

    def __init__(self, live: Live, log: FencedLog, trouble: Callable[[], str]) -> None:
        self._live = live
        self._trouble = trouble
        self._log = log
        self._snapshot: Picture | None = None
        self._read_at = -SNAPSHOT_AGE_MAX_S

    async def look(self) -> Picture | None:
        """None if there has never been a leader. Raises `Unavailable` if this is a standby and the event log is unavailable."""
        if (picture := self._live()) is not None:
            return replace(picture, trouble=trouble) if (trouble := self._trouble()) else picture
        if anyio.current_time() - self._read_at >= SNAPSHOT_AGE_MAX_S:
            parts = await self._log.snapshot(LEADER_LEASE)
            self._snapshot = Picture(snapshot.load(parts), trouble=self._trouble()) if parts else None
            self._read_at = anyio.current_time()
        return self._snapshot
