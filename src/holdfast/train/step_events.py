"""The script's callback after a step: `run.on_step`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedStep:
    """What this rank has measured of one step. Times in Unix seconds."""

    step: int  # steps finished, this one included
    started_at: float
    ended_at: float
    data_s: float  # waited for data
    comm_wait_s: float | None  # waited for other ranks; None = not measured
    stall_s: float  # blocked by saves since the step before
    tokens: int  # of this rank


OnStep = Callable[[FinishedStep], None]
