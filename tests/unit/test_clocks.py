"""Another machine's clock: told from delays, and corrected only where it is wrong."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.domain.clocks import RECENT, TOLERATED_S, OtherClock, in_words

HOUR_S = 3600.0
NOW = 1_800_000_000.0


def heard(clock: OtherClock, ahead_s: float, delays_s: list[float], begin: float = NOW) -> float:
    """Messages, one per second; returns the time after them."""
    for number, delay_s in enumerate(delays_s):
        sent_at = begin + number
        clock.saw(sent_at + ahead_s, sent_at + delay_s)
    return begin + len(delays_s)


@given(
    st.floats(-12 * HOUR_S, 12 * HOUR_S),
    st.lists(st.floats(0.0, 30.0), max_size=100),
    st.lists(st.floats(0.0, 600.0), max_size=RECENT),
)
def test_a_correction_is_right_once_a_message_was_quick_and_stays_the_same(
    ahead_s: float, before: list[float], after: list[float]
) -> None:
    clock = OtherClock()
    now = heard(clock, ahead_s, [*before, 0.01])
    known_s = clock.ahead_s
    assert abs(known_s - ahead_s) <= TOLERATED_S + 0.02
    assert clock.ours(NOW + ahead_s) == pytest.approx(NOW, abs=TOLERATED_S + 0.02)
    heard(clock, ahead_s, after, now)  # as after a freeze of the receiver, or of the network
    assert clock.ahead_s == known_s


@given(
    st.floats(-TOLERATED_S / 2, TOLERATED_S / 2), st.lists(st.floats(0.0, TOLERATED_S / 2), min_size=1, max_size=100)
)
def test_times_of_a_right_clock_are_left_alone(ahead_s: float, delays_s: list[float]) -> None:
    clock = OtherClock()
    heard(clock, ahead_s, delays_s)
    assert clock.ahead_s == 0.0
    assert clock.ours(NOW) == NOW


def test_a_clock_that_is_set_is_followed() -> None:
    clock = OtherClock()
    now = heard(clock, -HOUR_S, [0.1] * 10)
    now = heard(clock, 0.0, [0.1], now)
    assert clock.ahead_s == 0.0, "set ahead: known at once"
    now = heard(clock, -HOUR_S, [0.1] * 2 * RECENT, now)
    assert clock.ahead_s == pytest.approx(-HOUR_S, abs=0.2), "set back: after some messages"


def test_an_impossible_time_says_nothing() -> None:
    clock = OtherClock()
    heard(clock, HOUR_S, [0.1])
    for at in (math.nan, math.inf, -math.inf):
        clock.saw(at, NOW)
    assert clock.ahead_s == pytest.approx(HOUR_S, abs=0.2)


@pytest.mark.parametrize(
    ("ahead_s", "words"),
    [
        (3601.0, "1 h 0 min ahead of"),
        (-90.4, "1 min 30 s behind"),
        (2.4, "2 s ahead of"),
        (-7199.9, "2 h 0 min behind"),
    ],
)
def test_differences_are_spelled(ahead_s: float, words: str) -> None:
    assert in_words(ahead_s) == words
