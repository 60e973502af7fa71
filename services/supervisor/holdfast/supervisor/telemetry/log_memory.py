"""Warns when the memory of the event log fills up, before it is full and no decisions are possible."""

from __future__ import annotations

import anyio
import structlog

from holdfast.domain.errors import HoldfastError
from holdfast.log import durability
from holdfast.log.protocol import EventLog

EVERY_S = 10.0

log = structlog.get_logger("holdfast.supervisor.telemetry.log_memory")


async def watch(event_log: EventLog) -> None:
    """Runs until cancelled. Warns once each time the memory fills up. An unavailable log is reported elsewhere."""
    reported = False
    while True:
        try:
            risk = durability.crowded(await event_log.usage())
        except HoldfastError:
            risk = ""
        if risk and not reported:
            log.warning("Redis fills up", reason=risk, advice=durability.ROOM_ADVICE)
        reported = bool(risk)
        await anyio.sleep(EVERY_S)
