"""Garbage collection of a service that remembers a fleet: millions of objects and no cycles.

Looking through all of them stops everything for as long as a second, in the middle of an incident.
"""

from __future__ import annotations

import gc


def collect_seldom() -> None:
    """What there is at the start is never looked at again, the rest after many more new objects than by default."""
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
