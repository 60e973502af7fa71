"""Garbage collection settings for a service with the state of a fleet: millions of objects and no cycles.

A full collection would stop the service for up to a second, during an incident. So collections are rare, and a service that has
nothing to do collects before it must.
"""

from __future__ import annotations

import gc

AT_REST_OBJECTS = 50_000  # new ones that are left; a collection of these takes 20 ms


def collect_seldom() -> None:
    """Exclude the present objects from collection, and collect the others only when there are many more than before.

    The interpreter subtracts what was freed: a save of a large job, which replaces a million values, stays below that."""
    gc.freeze()
    gc.set_threshold(500_000, 5, 100)


def collect_at_rest() -> None:
    """Collect now what the interpreter would collect soon, perhaps during an incident. Does nothing if few objects are new."""
    _, *older = gc.get_threshold()
    due = [generation for generation, most in enumerate((AT_REST_OBJECTS, *older)) if gc.get_count()[generation] > most]
    if due:
        gc.collect(due[-1])
