"""How often a run saves, as orders change it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.train.intervals import INTERVALS_MAX, Intervals


def due(intervals: Intervals, steps: int) -> list[int]:
    return [step for step in range(1, steps + 1) if intervals.due(step)]


def test_multiples_of_the_interval_are_due_and_zero_means_never() -> None:
    assert due(Intervals(5), 20) == [5, 10, 15, 20]
    assert due(Intervals(0), 20) == []


def test_a_change_counts_from_its_step_on() -> None:
    intervals = Intervals(5)
    intervals.change(12, 4)
    assert due(intervals, 24) == [5, 10, 12, 16, 20, 24]


def test_a_change_to_zero_stops_saving_and_one_from_zero_starts_it() -> None:
    intervals = Intervals(0)
    intervals.change(10, 5)
    intervals.change(20, 0)
    assert due(intervals, 30) == [10, 15]


def test_a_later_order_for_an_earlier_or_the_same_step_replaces_what_was_planned_after_it() -> None:
    intervals = Intervals(5)
    intervals.change(20, 7)
    intervals.change(10, 4)
    intervals.change(10, 3)
    assert due(intervals, 24) == [5, 12, 15, 18, 21, 24]


@given(st.lists(st.tuples(st.integers(1, 200), st.integers(0, 20)), max_size=40), st.integers(0, 20))
def test_the_newest_order_that_has_begun_decides_and_the_plan_stays_small(
    orders: list[tuple[int, int]], first: int
) -> None:
    """Orders come in the order of their steps, as the supervisor gives them."""
    orders.sort(key=lambda order: order[0])
    intervals = Intervals(first)
    for from_step, interval in orders:
        intervals.change(from_step, interval)
    last_step = orders[-1][0] if orders else 0
    decides = orders[-1][1] if orders else first
    for step in range(last_step, last_step + 50):
        assert intervals.due(step) == (decides > 0 and step % decides == 0)
    assert len(intervals._plan) <= INTERVALS_MAX + 1
