"""Says that the log's memory fills up, before it is full and nothing can be decided any more."""

from __future__ import annotations

import anyio
import structlog

from holdfast.domain.errors import HoldfastError
from holdfast.log import durability
from holdfast.log.protocol import EventLog

EVERY_S = 10.0

log = structlog.get_logger("holdfast.supervisor.telemetry.log_memory")


async def watch(event_log: EventLog) -> None:
    """Until cancelled. Said once for each time that it fills up; a log that is away is others' to report."""
    said = False
    while True:
        try:
            risk = durability.crowded(await event_log.usage())
        except HoldfastError:
            risk = ""
        if risk and not said:
            log.warning("Redis fills up", reason=risk, advice=durability.ROOM_ADVICE)
        said = bool(risk)
        await anyio.sleep(EVERY_S)
