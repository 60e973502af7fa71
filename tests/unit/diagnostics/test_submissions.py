"""Submissions of one name are distinguished by their ids, never by a clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnosing import BUG, T0, Fleet

from holdfast.domain.findings import FindingKind
from holdfast.domain.job import HangSpec
from holdfast.domain.signals import GenerationStopped, Signal


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


def replaced_by_a_lower_generation() -> tuple[Fleet, list[Signal]]:
    """The event log has lost a job at generation 7. It runs again as generation 1 on two of its three nodes. Returns what the
    third one, which was cut off, reports when it returns."""
    fleet = Fleet(nodes=3, submission="s1")
    fleet.start(7)
    fleet.run(until=5.0)
    late: list[Signal] = [
        fleet.started("n2"),
        fleet.progress("n2"),
        replace(fleet.exit_of(2, signal=9), submission="s1"),
        GenerationStopped("n2", T0 + fleet.now, fleet.job, 7, submission="s1"),
    ]
    fleet.stop("n0", "n1")
    fleet.submission, fleet.nodes, fleet.ranks = "s2", 2, {0: fleet.ranks[0], 1: fleet.ranks[1]}
    fleet.start(1, connect=False)
    fleet.run(until=10.0)
    return fleet, late


@pytest.mark.parametrize("which", range(4), ids=["start", "progress", "exit", "stop"])
def test_what_is_left_of_an_earlier_submission_hides_no_fault_of_a_lower_generation(which: int) -> None:
    fleet, late = replaced_by_a_lower_generation()
    found = len(fleet.found)
    fleet.fold(late[which])
    assert len(fleet.found) == found, "nothing is concluded about a run that is over"
    fleet.exits(0, signal=9)
    assert (fleet.found[-1].kind, fleet.found[-1].generation) == (FindingKind.WORKER_CRASH, 1)
    assert len(fleet.found) == found + 1


def test_a_hang_of_a_lower_generation_is_found_while_a_node_still_runs_the_earlier_submission() -> None:
    fleet, (start, progress, *_) = replaced_by_a_lower_generation()
    fleet.fold(start)
    fleet.training = False
    fleet.ranks[1].state = "T"
    found = len(fleet.found)
    while fleet.now < 120.0 and len(fleet.found) == found:
        fleet.fold(progress)
        fleet.run(until=fleet.now + 1.0)
    assert (fleet.found[-1].kind, fleet.found[-1].generation, fleet.found[-1].rank) == (FindingKind.HANG, 1, 1)


@pytest.mark.parametrize("first", [1, 2], ids=["as the one before", "lower than the one before"])
def test_a_worker_that_exits_before_its_submission_has_started_is_found(first: int) -> None:
    """A process of a Prepare ends before START. No node has reported a start of this submission yet."""
    fleet = Fleet(nodes=2, submission="s1")
    fleet.start(first)
    fleet.run(until=5.0)
    fleet.stop()
    fleet.generation, fleet.submission = 1, "s2"
    found = len(fleet.found)
    fleet.ranks[0].step = 0
    fleet.exits(0, signal=9, submission="s2")
    fleet.start(1, connect=False)
    fleet.run(until=fleet.now + 2.0)
    crashes = [each for each in fleet.found[found:] if each.kind is FindingKind.WORKER_CRASH]
    assert [(each.generation, each.rank) for each in crashes] == [(1, 0)]
