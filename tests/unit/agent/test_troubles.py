"""Which of the replicator's problems are passed on to diagnostics, and when again."""

from __future__ import annotations

from holdfast.agent.troubles import REPEAT_S, TroubleReports
from holdfast.domain.replication import Trouble, TroubleKind

FULL = Trouble(TroubleKind.TIER_FAILS, "disk", "no space left", 100.0)
DAMAGED = Trouble(TroubleKind.SET_ASIDE, "step 10 in disk", "checksum", 110.0)


def test_a_problem_is_passed_on_when_it_is_new_and_again_while_it_lasts() -> None:
    reports = TroubleReports()
    assert reports.due("gpt", (FULL,), 0.0) == [FULL]
    assert reports.due("gpt", (FULL,), REPEAT_S - 1) == []
    assert reports.due("gpt", (FULL,), REPEAT_S) == [FULL]
    assert reports.due("gpt", (FULL,), REPEAT_S + 1) == []
    assert reports.due("other", (FULL,), REPEAT_S + 1) == [FULL]


def test_a_problem_that_ended_is_new_when_it_comes_again() -> None:
    reports = TroubleReports()
    assert reports.due("gpt", (FULL,), 0.0) == [FULL]
    assert reports.due("gpt", (), 1.0) == []
    assert reports.due("gpt", (FULL,), 2.0) == [FULL]


def test_a_damaged_file_is_passed_on_once() -> None:
    reports = TroubleReports()
    assert reports.due("gpt", (DAMAGED, FULL), 0.0) == [DAMAGED, FULL]
    assert reports.due("gpt", (DAMAGED, FULL), 2 * REPEAT_S) == [FULL]
