"""Checks whether a Redis keeps its data across a restart, and how much memory is left. Redis is the only store of decisions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.domain.errors import HoldfastError
from holdfast.log.protocol import Usage

ADVICE = "start Redis with --appendonly yes --appendfsync everysec (a hosted one: turn AOF on)"

ROOM_ADVICE = "raise Redis' maxmemory, or delete other data from this Redis"

PRIMARY_ADVICE = "name the primary in HOLDFAST_REDIS_URL"

SPACE_ADVICE = "free space on its disk, and see its log"

EVICTION_ADVICE = "set maxmemory-policy noeviction, in its configuration too"

URL_FORMS = "redis://host:port/db, rediss://… or unix:///path, with options that redis-py knows, and password_file=PATH"

CROWDED = 0.8  # fraction of maxmemory, as in the alert rule HoldfastEventLogFull


@dataclass(frozen=True, slots=True)
class Risk:
    """How a Redis can lose data, and what to do."""

    found: str
    advice: str


def require_data(server: Mapping[str, Any], address: str) -> None:
    """Check INFO server. Raises `HoldfastError` for a Sentinel, which answers and has no data."""
    if server.get("redis_mode") == "sentinel":
        raise HoldfastError(
            f"{address} is a Redis Sentinel, which has no data; name the Redis that it watches, or an address that follows the "
            "failover, in HOLDFAST_REDIS_URL"
        )


def risks(info: Mapping[str, Any]) -> Iterator[Risk]:
    """Why a Redis with this INFO refuses writes, or can lose data."""
    if info.get("role") == "slave":
        yield Risk("it is a replica, and refuses writes", PRIMARY_ADVICE)
    for what, field in (
        ("write to its append-only file", "aof_last_write_status"),
        ("snapshot", "rdb_last_bgsave_status"),
    ):
        if info.get(field, "ok") != "ok":
            yield Risk(f"its last {what} failed ({field}); it refuses writes until one succeeds", SPACE_ADVICE)
    if found := risk(info):
        yield Risk(found, ADVICE)
    if found := evicting(info):
        yield Risk(found, EVICTION_ADVICE)


def crowded(usage: Usage) -> str:
    """Describe the memory use of this Redis if it is near its limit; empty if there is room."""
    if not usage.limit_bytes or usage.used_bytes < CROWDED * usage.limit_bytes:
        return ""
    return (
        f"it uses {usage.used_bytes / usage.limit_bytes:.0%} of the {usage.limit_bytes / 2**20:.0f} MiB of its limit. When "
        "it is full, no decisions are made; training continues"
    )


def evicting(memory: Mapping[str, Any]) -> str:
    """Describe what this Redis deletes when its memory is full, based on INFO memory; empty if it deletes nothing."""
    policy = memory.get("maxmemory_policy", "noeviction")
    if policy == "noeviction":
        return ""
    limit = int(memory.get("maxmemory", 0))
    when = f"at the limit of its memory, {limit / 2**20:.0f} MiB," if limit else "as soon as its memory has a limit"
    return f"its maxmemory-policy is {policy}: {when} it would delete jobs, open incidents or the lease of the leader"


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


def without_password(url: str) -> str:
    """Return the URL without its password, for messages."""
    scheme, separator, rest = url.partition("://")
    credentials, at, place = rest.rpartition("@")
    user = credentials.partition(":")[0]
    return f"{scheme}{separator}{user + ':***@' if at else ''}{place}" if separator else "***"
