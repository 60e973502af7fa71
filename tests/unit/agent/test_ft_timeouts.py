"""When a rank with nvidia-resiliency-ext's client is overdue: never before somebody has said, or enough has been seen."""

from __future__ import annotations

import pytest

from holdfast.agent.workers.ft_messages import Heartbeat, Section, Timeouts, Update
from holdfast.agent.workers.ft_server import timeouts_of
from holdfast.agent.workers.ft_timeouts import Watch
from holdfast.domain.errors import InvalidSpec

OPEN, CLOSE = Section("open", "step"), Section("close", "step")


def watch(timeouts: Timeouts | None = None) -> Watch:
    return Watch(timeouts or Timeouts(), least_s=600.0, began=0.0)


def test_nothing_is_judged_without_a_number_or_experience() -> None:
    quiet = watch()
    assert quiet.overdue(1e6) == ""
    quiet.fold(Heartbeat(), 1.0)
    assert quiet.overdue(1e6) == ""


def test_heartbeats() -> None:
    reported = watch(Timeouts(initial=60.0, subsequent=30.0))
    assert reported.overdue(60.0) == ""
    assert (
        reported.overdue(61.0) == "the first heartbeat has not arrived for 61.0 s; 60.0 s are allowed (set for the job)"
    )
    reported.fold(Heartbeat(), 50.0)
    assert reported.overdue(80.0) == ""
    assert reported.overdue(80.5) == "no heartbeat has arrived for 30.5 s; 30.0 s are allowed (set for the job)"
    reported.fold(Update((100.0, 10.0), None), 50.0)
    assert (
        reported.overdue(60.5) == "no heartbeat has arrived for 10.5 s; 10.0 s are allowed (calculated by the script)"
    )


def test_sections_and_what_is_between_them() -> None:
    reported = watch(Timeouts(sections={"step": 5.0}, out_of_section=2.0))
    assert reported.overdue(2.5).startswith("no section has been open for 2.5 s; 2.0 s are allowed")
    assert reported.fold(OPEN, 1.0) == ""
    assert reported.overdue(6.0) == ""
    assert reported.overdue(6.5).startswith("section 'step' has been open for 5.5 s; 5.0 s are allowed")
    reported.fold(Section("open", "save"), 2.0)  # another one that is open hides nothing
    assert "section 'step'" in reported.overdue(7.0)
    reported.fold(Section("close_all", ""), 3.0)
    assert reported.overdue(5.0) == ""
    assert "no section" in reported.overdue(5.5)


def test_what_the_client_itself_would_refuse() -> None:
    reported = watch()
    assert reported.fold(CLOSE, 1.0) == "Section 'step' is not open."
    assert reported.fold(OPEN, 1.0) == ""
    assert reported.fold(OPEN, 1.0) == "Section 'step' is already open."


def test_time_outs_are_learned_and_never_short() -> None:
    learning = watch()
    for number in range(4):  # three intervals between four
        learning.fold(Heartbeat(), 100.0 * number)
        learning.fold(OPEN, 100.0 * number)
        learning.fold(CLOSE, 100.0 * number + 10)
    assert learning.overdue(300.0 + 600.0) == ""  # 5 × 100 s, but at least 600 s
    learning.fold(OPEN, 310.0)
    assert (
        "section 'step' has been open for 601.0 s; 600.0 s are allowed (learned from earlier ones)"
        in learning.overdue(911.0)
        or ("no heartbeat" in learning.overdue(911.0))
    )
    slow = watch()
    for number in range(4):
        slow.fold(Heartbeat(), 200.0 * number)
    assert slow.overdue(600.0 + 1000.0) == ""
    assert (
        slow.overdue(600.0 + 1001.0)
        == "no heartbeat has arrived for 1001.0 s; 1000.0 s are allowed (learned from earlier ones)"
    )


def test_what_nobody_listened_to_proves_nothing() -> None:
    reported = watch(Timeouts(subsequent=5.0, sections={"step": 5.0}))
    reported.fold(Heartbeat(), 1.0)
    reported.fold(OPEN, 1.0)
    reported.unheard(100.0)
    assert reported.overdue(104.0) == ""
    assert reported.overdue(106.0)


def test_the_jobs_own_numbers() -> None:
    environment = {
        "FT_RANK_SECTION_TIMEOUTS": "setup:600, step:180.5,save:,eval:none",
        "FT_RANK_HEARTBEAT_TIMEOUT": "30",
        "FT_RANK_OUT_OF_SECTION_TIMEOUT": "null",
    }
    sections = {"setup": 600.0, "step": 180.5, "save": None, "eval": None}
    assert timeouts_of(environment) == Timeouts(None, 30.0, sections, None)
    assert timeouts_of({}) == Timeouts()
    for name, value in (
        ("FT_RANK_SECTION_TIMEOUTS", ":5"),
        ("FT_RANK_HEARTBEAT_TIMEOUT", "-1"),
        ("FT_RANK_HEARTBEAT_TIMEOUT", "x"),
    ):
        with pytest.raises(InvalidSpec, match=name):
            timeouts_of({name: value})
