"""Checks whether a Redis keeps its data across a restart, and how much memory is left. Redis is the only store of decisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.log.protocol import Usage

ADVICE = "start Redis with --appendonly yes --appendfsync everysec (a hosted one: turn AOF on)"

ROOM_ADVICE = "raise Redis' maxmemory, or delete other data from this Redis"

CROWDED = 0.8  # fraction of maxmemory, as in the alert rule HoldfastEventLogFull


def crowded(usage: Usage) -> str:
    """Describe the memory use of this Redis if it is near its limit; empty if there is room."""
    if not usage.limit_bytes or usage.used_bytes < CROWDED * usage.limit_bytes:
        return ""
    return (
        f"it uses {usage.used_bytes / usage.limit_bytes:.0%} of the {usage.limit_bytes / 2**20:.0f} MiB of its limit. When "
        "it is full, no decisions are made; training continues"
    )


def risk(persistence: Mapping[str, Any]) -> str:
    """Describe the data that a restart of this Redis would lose, based on INFO persistence; empty if at most the last
    second."""
    match persistence.get("aof_enabled"):
        case 1:
            return ""
        case 0:
            return (
                "its append-only file is off: a restart of Redis would lose jobs, open incidents and orders; training would "
                "continue without recovery"
            )
        case _:
            return (
                "its INFO does not show whether the append-only file is on; without it, a restart would lose jobs and "
                "incidents"
            )
