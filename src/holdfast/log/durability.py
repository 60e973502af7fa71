"""Whether a Redis keeps what it is told: over its own restart, and for want of memory. Decisions are kept nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.log.protocol import Usage

ADVICE = "start Redis with --appendonly yes --appendfsync everysec (a hosted one: turn AOF on)"

ROOM_ADVICE = "raise Redis' maxmemory, or remove what else is stored there"

CROWDED = 0.8  # of what it may use; the alert rule HoldfastEventLogFull says the same


def crowded(usage: Usage) -> str:
    """How near this Redis is to refusing everything; empty when there is room."""
    if not usage.limit_bytes or usage.used_bytes < CROWDED * usage.limit_bytes:
        return ""
    return (
        f"it uses {usage.used_bytes / usage.limit_bytes:.0%} of the {usage.limit_bytes / 2**20:.0f} MiB that it may: once it "
        "is full nothing is decided, and training goes on"
    )


def risk(persistence: Mapping[str, Any]) -> str:
    """What a restart of this Redis costs, from its INFO section `persistence`; empty when at most a second's news."""
    match persistence.get("aof_enabled"):
        case 1:
            return ""
        case 0:
            return (
                "its append-only file is off: a restart of Redis forgets jobs, open incidents and commands; "
                "training goes on, and nobody repairs it"
            )
        case _:
            return (
                "it does not say whether its append-only file is on; without one a restart forgets jobs and incidents"
            )
