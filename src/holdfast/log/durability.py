"""Whether a Redis keeps what it was told over its own restart. Holdfast keeps its decisions nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ADVICE = "start Redis with --appendonly yes --appendfsync everysec (a hosted one: turn AOF on)"


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
