"""Garbage collection settings for a service with the state of a fleet: millions of objects and no cycles.

A full collection would stop the service for up to a second, perhaps during an incident. So collections are rare, and an idle
service collects before the interpreter would.
"""

from __future__ import annotations

import gc

AT_REST_OBJECTS = 50_000  # new objects that need no collection; collecting them takes 20 ms


def collect_seldom() -> None:
    """Exclude the present objects from collection, and collect the others only when there are many more than before.

    The interpreter subtracts freed objects, so a save of a large job, which replaces a million values, stays below the
    threshold."""
    gc.freeze()
    gc.set_threshold(500_000, 5, 100)


def collect_at_rest() -> None:
    """Collect now if the interpreter would collect soon, perhaps during an incident. Does nothing if few objects are new."""
    _, *older = gc.get_threshold()
    due = [generation for generation, most in enumerate((AT_REST_OBJECTS, *older)) if gc.get_count()[generation] > most]
    if due:
        gc.collect(due[-1])
