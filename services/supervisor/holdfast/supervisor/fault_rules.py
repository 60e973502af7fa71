"""Supervisor settings that allow faults of the control plane to be injected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RedisKill = Literal["no", "restarted"]
LeaderKill = Literal["no", "standby", "restarted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFaultRules:
    """Allowed faults. Each value names what brings the part back: a restart of the part, or a standby."""

    redis_kill: RedisKill = "no"
    leader_kill: LeaderKill = "no"
