"""Watches the memory of the event log: warns when it fills up, and says that no decisions are possible when it is full. A
leader that has had nothing to write does not know it otherwise."""

from __future__ import annotations

import anyio
import structlog

from holdfast.domain.errors import HoldfastError
from holdfast.log import durability
from holdfast.log.protocol import EventLog

EVERY_S = 2.0
FULL = f"the memory of Redis is full, so it rejects writes; {durability.ROOM_ADVICE}"

log = structlog.get_logger("holdfast.supervisor.telemetry.log_memory")


class Room:
    """`trouble`: why nothing can be written; empty = there is room, or the log is unavailable, which is reported elsewhere."""

    def __init__(self, event_log: EventLog) -> None:
        self._log = event_log
        self.trouble = ""

    async def watch(self) -> None:
        """Runs until cancelled. Warns once each time the memory fills up."""
        reported = False
        while True:
            try:
                usage = await self._log.usage()
            except HoldfastError:
                risk, self.trouble = "", ""
            else:
                risk, self.trouble = durability.crowded(usage), FULL if usage.full else ""
            if risk and not reported:
                log.warning("Redis fills up", reason=risk, advice=durability.ROOM_ADVICE)
            reported = bool(risk)
            await anyio.sleep(EVERY_S)
