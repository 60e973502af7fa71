"""First steps wait in the agent for a heartbeat, and are repeated until the supervisor has recorded them."""

from __future__ import annotations

from supervising import facts

from holdfast.agent.connection.reports import Reports
from holdfast.domain.orders import Hello, RanksFinished, RanksStepping, Report

HELLO = Hello(facts("a"))


def on_a_session() -> Reports:
    reports = Reports()
    reports.greet(HELLO)
    assert taken(reports) == [HELLO]
    return reports


def stepping(job: str = "gpt", generation: int = 1) -> RanksStepping:
    return RanksStepping(job, generation, (0, 1), 5, 12.5, (("first_step", 0.5),))


def wants_beat(reports: Reports) -> bool:
    return reports.wants_beat


def taken(reports: Reports) -> list[Report]:
    found = []
    while (numbered := reports.take()) is not None:
        found.append(numbered.report)
        reports.acknowledge(numbered.seq)
    return found


def test_heartbeats_repeat_first_steps_until_they_are_recorded() -> None:
    reports = on_a_session()
    assert not wants_beat(reports)
    reports.add(stepping())
    assert taken(reports) == []
    assert wants_beat(reports), "it does not wait for the next heartbeat"
    assert reports.in_beat() == (stepping(),)
    assert not wants_beat(reports)
    reports.recorded("gpt", 2)
    reports.recorded("another", 1)
    assert reports.in_beat() == (stepping(),)
    reports.recorded("gpt", 1)
    reports.recorded("gpt", 1)
    assert reports.in_beat() == ()


def test_first_steps_of_a_later_generation_replace_earlier_ones_of_their_job() -> None:
    reports = on_a_session()
    for each in (stepping(), stepping("bert"), stepping(generation=2)):
        reports.add(each)
        taken(reports)
        reports.in_beat()
    assert set(reports.in_beat()) == {stepping("bert"), stepping(generation=2)}


def test_later_reports_do_not_overtake_first_steps() -> None:
    reports = on_a_session()
    finished = RanksFinished("gpt", 1, (0, 1), 13.0)
    reports.add(stepping())
    reports.add(finished)
    assert taken(reports) == []
    assert reports.in_beat() == (stepping(),)
    assert taken(reports) == [finished]


def test_the_next_session_repeats_what_was_not_recorded_before_later_reports() -> None:
    """The previous supervisor may have ended before its commit."""
    reports = on_a_session()
    reports.add(stepping())
    assert taken(reports) == []
    reports.in_beat()
    reports.add(RanksFinished("gpt", 1, (0, 1), 13.0))
    reports.greet(HELLO)
    assert taken(reports) == [HELLO]
    assert wants_beat(reports)
    assert reports.in_beat() == (stepping(),)
    assert taken(reports) == [RanksFinished("gpt", 1, (0, 1), 13.0)]
