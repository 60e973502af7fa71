"""How long diagnostics has not acknowledged telemetry: what heartbeats tell."""

from __future__ import annotations

from holdfast.agent.connection.contact import GAP_S, LATE_S, Contact


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def contact() -> tuple[Contact, Clock]:
    clock = Clock()
    return Contact(clock), clock


def test_without_diagnostics_nothing_is_cut() -> None:
    known, clock = contact()
    clock.now += 1000.0
    assert known.cut_s() == 0.0


def test_diagnostics_that_has_never_answered_is_cut_since_its_address_is_known() -> None:
    known, clock = contact()
    clock.now += 50.0
    known.expected()
    clock.now += GAP_S
    assert known.cut_s() == 0.0
    clock.now += 1.0
    known.expected()  # a new session names the endpoints again
    assert known.cut_s() == GAP_S + 1.0


def test_a_stream_that_is_opened_again_soon_was_not_cut() -> None:
    known, clock = contact()
    known.expected()
    known.answered()
    known.ended()
    clock.now += GAP_S
    assert known.cut_s() == 0.0
    known.answered()
    clock.now += LATE_S
    assert known.cut_s() == 0.0, "an open stream is not acknowledged at every tick"


def test_a_stream_that_is_open_and_not_served_is_cut_since_its_last_acknowledgement() -> None:
    known, clock = contact()
    known.expected()
    clock.now += 3.0
    known.answered()
    clock.now += LATE_S + 1.0
    assert known.cut_s() == LATE_S + 1.0


def test_streams_that_end_without_an_acknowledgement_do_not_end_the_cut() -> None:
    known, clock = contact()
    known.expected()
    known.answered()
    for _ in range(10):
        known.ended()
        clock.now += 1.0
    assert known.cut_s() == 10.0
    known.answered()
    assert known.cut_s() == 0.0
