"""Settings for nodes that fail repeatedly (core/rules/offenders.py): when they are quarantined, and how spares compare."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.supervisor.return_rules import DAY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class OffenderRules:
    """Settings HOLDFAST_QUARANTINE_* and HOLDFAST_SPARE_PRIOR_*: docs/diagnostics.md. The sources of the defaults are given."""

    # NVSentinel hands a node to support after 5 remediations in 7 days. Evenly spread, they add up to 2.8 with this half-life.
    # 2.5 is also reached by 3 faults within a day. By chance that happens to an average node (6.5 failures per 1,000
    # node-days, RSC-1) once in 20 million days.
    limit: float = 2.5
    half_life_s: float = 3.5 * DAY_S
    window_s: float = 28 * DAY_S  # older faults are dropped; Meta searches for lemons over 28 days
    maybe_weight: float = 0.5  # of a crash that may also be the script's
    together_s: float = 60.0  # 9 % of StepFun's faults share a minute with another node's: a common cause
    fraction_max: float = 0.1  # of the fleet in quarantine at once; one node in any case. Lemons are 1-2 % (Meta)
    # Gamma prior of a node's hazard: its mean is RSC-1's rate, its shape that of StepFun's faults (0.49).
    prior_faults: float = 0.5
    prior_s: float = 77 * DAY_S
    kept_max: int = 16  # faults kept per node; not a setting
