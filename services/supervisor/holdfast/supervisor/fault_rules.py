"""Which faults of the control plane may be injected: settings of the supervisor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RedisKill = Literal["no", "restarted"]
LeaderKill = Literal["no", "standby", "restarted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnFaultRules:
    """What the operator allows, by naming what brings the part back: whatever starts it again, or a standby."""

    redis_kill: RedisKill = "no"
    leader_kill: LeaderKill = "no"
