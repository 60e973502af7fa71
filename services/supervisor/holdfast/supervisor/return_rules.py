"""Settings for nodes that failed: when they may have ranks again (core/rules/holddown.py), and when another machine is
requested (core/repair/replacements.py)."""

from __future__ import annotations

from dataclasses import dataclass

DAY_S = 86_400.0
TEST_FAILURES_MAX = 16  # that are kept of a node


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnRules:
    """Settings HOLDFAST_NODE_*: docs/policies.md."""

    hold_s: float = 600.0  # hold-down after the first fault; doubled with each further one within the window …
    hold_s_max: float = 21_600.0  # … up to this
    window_s: float = 7 * DAY_S  # a fault counts for this long; NVSentinel counts remediations over the same time
    losses_free: int = 1  # losses within the window that cost no hold-down
    probation_s: float = 7200.0  # after a second fault of its own within this time, an operator must repair it
    test_failures_free: int = 2  # test failures of a node without ranks within the window that cost no hold-down


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacementRules:
    """Settings HOLDFAST_PROVIDER and HOLDFAST_REPLACE*: docs/policies.md."""

    provider: str = ""  # name of the provider; empty = none
    after_s: float = 1800.0  # time out of service after which a node that could still return is replaced
    per_day_max: int = 10  # machines of the fleet
