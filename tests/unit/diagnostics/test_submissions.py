"""Submissions of one name are distinguished by their ids, never by a clock."""

from __future__ import annotations

import pytest
from diagnosing import BUG, Fleet

from holdfast.domain.findings import FindingKind
from holdfast.domain.job import HangSpec


@pytest.mark.parametrize("submission", ["s1", ""], ids=["reported", "not reported"])
@pytest.mark.parametrize("ahead_s", [-3600.0, 3600.0])
def test_hangs_of_a_job_are_found_although_one_clock_is_an_hour_off(ahead_s: float, submission: str) -> None:
    fleet = Fleet(nodes=3, hang=HangSpec(floor_s=3.0), submission=submission, clock_ahead_s={"n1": ahead_s})
    fleet.start()
    fleet.run(until=5.0)
    for node in fleet.names:  # every new stream says again what runs
        fleet.connects(node)
        fleet.fold(fleet.started(node))
        fleet.run(until=fleet.now + 0.5)
    fleet.training = False
    fleet.ranks[2].state = "T"
    fleet.run(until=20.0)
    assert (fleet.only().kind, fleet.only().rank) == (FindingKind.HANG, 2)


@pytest.mark.parametrize("submission", ["s2", ""], ids=["reported", "not reported"])
def test_a_later_submission_starts_anew(submission: str) -> None:
    """Stopped at generation 3, then run again under its name: what the first one did is not counted against it."""
    fleet = Fleet(nodes=2, submission="s1" if submission else "")
    for generation in (1, 2, 3):
        fleet.start(generation, connect=generation == 1)
        fleet.exits(0, error=BUG)
        fleet.run(until=fleet.now + 1.0)
        fleet.stop()
    repeated = fleet.kinds().count(FindingKind.REPEATED_EXCEPTION)
    fleet.submission = submission
    fleet.start(1, connect=False)
    fleet.exits(0, error=BUG)
    assert fleet.kinds().count(FindingKind.REPEATED_EXCEPTION) == repeated
    assert fleet.found[-1].generation == 1


@pytest.mark.parametrize("again", ["s1", "s2"])
def test_generations_whose_numbers_go_on_belong_to_the_submission_that_they_name(again: str) -> None:
    """Nobody saw the first submission stop, and a second one goes on counting: only the token tells them apart."""
    fleet = Fleet(nodes=2, submission="s1")
    fleet.start(1)
    fleet.exits(0, error=BUG)
    fleet.submission = again
    fleet.start(2, connect=False)
    fleet.exits(0, error=BUG)
    assert (fleet.found[-1].kind is FindingKind.REPEATED_EXCEPTION) == (again == "s1")


def test_a_late_word_of_an_older_generation_is_no_later_submission() -> None:
    fleet = Fleet(nodes=2)
    fleet.start(1)
    late = fleet.started("n1")
    fleet.start(2, connect=False)
    fleet.run(until=5.0)
    fleet.now += 300.0
    fleet.fold(late)
    fleet.exits(0, signal=9)
    assert fleet.found[-1].generation == 2
