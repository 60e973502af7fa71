"""Levels of the supervisor's log lines: `level` of warning and above is what somebody must read."""

from __future__ import annotations

from collections.abc import Sequence

import structlog.testing
from fleet import asked_to_end, job, running

from holdfast.domain.findings import FindingKind
from holdfast.supervisor.protocol import Noted
from holdfast.supervisor.published import Published
from holdfast.supervisor.telemetry import announce


def lines(records: Sequence[Published]) -> list[tuple[str, str, str]]:
    """(level, event, state or phase) of what is not information."""
    with structlog.testing.capture_logs() as logged:
        for record in records:
            announce.decision(record)
    return [
        (each["log_level"], each["event"], str(each.get("state", each.get("phase"))))
        for each in logged
        if each["log_level"] != "info"
    ]


def test_a_lost_node_and_its_incident_are_one_warning_each_and_the_recovery_is_information() -> None:
    fleet = running(job(dp=2), spares=1)
    before = len(fleet.records)
    fleet.lose("n0")
    fleet.run()
    fleet.step_all()
    assert lines(fleet.records[before:]) == [("warning", "node", "lost"), ("warning", "incident", "open")]


def test_a_job_that_fails_is_an_error_and_one_that_cannot_go_on_a_warning() -> None:
    fleet = running(job(dp=2, restarts_without_progress_max=0))
    before = len(fleet.records)
    fleet.find(FindingKind.WORKER_CRASH, "n0", rank=0)
    assert ("error", "job", "failed") in lines(fleet.records[before:])
    fleet = running(job(dp=2, min_dp=2))
    before = len(fleet.records)
    fleet.lose("n0")
    assert ("warning", "job", "waiting") in lines(fleet.records[before:])


def test_a_planned_change_warns_nobody() -> None:
    fleet = running(job(dp=2), spares=1)
    before = len(fleet.records)
    asked_to_end(fleet, "n0")
    fleet.run()
    assert lines(fleet.records[before:]) == []


def test_a_breaker_that_opens_is_a_warning_and_its_end_is_information() -> None:
    opened = lines([Noted(1.0, "breaker", "open, no action until an operator resets it")])
    assert opened == [("warning", "noted", "None")]
    assert lines([Noted(2.0, "breaker", "closed: looked")]) == []
