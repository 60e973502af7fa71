"""Settings for network tests between nodes without ranks (core/repair/link_tests.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.domain.links import LinkLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRules:
    """Settings HOLDFAST_LINK_TEST*: docs/diagnostics.md."""

    every_s: float = 600.0  # of each node, on average; 0 = no tests
    limits: LinkLimits = field(default_factory=lambda: LinkLimits(64 << 20, 0.5))
