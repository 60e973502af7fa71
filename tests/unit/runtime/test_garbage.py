"""A service at rest collects garbage before the interpreter must, and not for a few objects."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from holdfast.runtime import garbage


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Nothing is collected but by the test."""
    threshold = gc.get_threshold()
    gc.collect(1)
    gc.set_threshold(10**9, *threshold[1:])
    yield
    gc.set_threshold(*threshold)


def collections(count: int) -> int:
    """How many collections follow when so many new objects are left."""
    found: list[str] = []
    kept = [[each] for each in range(count)]
    gc.callbacks.append(lambda phase, _: found.append(phase))
    try:
        garbage.collect_at_rest()
        garbage.collect_at_rest()
    finally:
        gc.callbacks.pop()
    del kept
    return found.count("stop")


def test_what_has_gathered_is_collected_once() -> None:
    assert collections(2 * garbage.AT_REST_OBJECTS) == 1


def test_a_few_objects_are_left() -> None:
    assert collections(1000) == 0


def test_the_older_generation_follows_when_it_is_due() -> None:
    for _ in range(gc.get_threshold()[1] + 1):
        gc.collect(0)
    garbage.collect_at_rest()
    assert gc.get_count()[1] == 0
