"""Garbage collection settings for a service with the state of a fleet: millions of objects and no cycles.

A full collection would stop the service for up to a second, during an incident.
"""

from __future__ import annotations

import gc


def collect_seldom() -> None:
    """Exclude the present objects from collection, and collect the others only after many more new objects than by default."""
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
