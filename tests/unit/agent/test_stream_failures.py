"""Which failures of a stream an agent logs: an address that is wrong must not fill its disk."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from holdfast.agent.connection.streams import REPEATED_EVERY_S, Failures

HERE, THERE = "10.0.0.1:8471", "10.0.0.2:8471"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def failures(clock: Clock) -> Failures:
    return Failures(clock)


def unreached(failures: Failures, endpoint: str = HERE, code: Any = grpc.StatusCode.UNAVAILABLE, why: str = "") -> None:
    error = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=why or "connection refused")
    failures.failed("control session failed", endpoint, error)


def test_an_hour_of_failures_is_a_line_a_minute_with_their_number(clock: Clock, failures: Failures) -> None:
    with capture_logs() as logs:
        for second in range(3600):
            clock.now = 1000.0 + second
            unreached(failures, why=f"socket {second} was refused")
    assert [each.get("times") for each in logs] == [None, *[REPEATED_EVERY_S] * 59]
    assert logs[0]["reason"] == "socket 0 was refused"
    assert logs[-1]["reason"] == "socket 3540 was refused"


def test_each_endpoint_and_each_new_reason_is_reported_at_once(failures: Failures) -> None:
    with capture_logs() as logs:
        for _ in range(3):
            unreached(failures)
            unreached(failures, THERE)
        unreached(failures, code=grpc.StatusCode.FAILED_PRECONDITION, why="of another fleet")
        failures.refused("control session refused", HERE, "no welcome within 5 s")
        unreached(failures)
    reported = [(each["endpoint"], each["reason"]) for each in logs]
    assert reported == [
        (HERE, "connection refused"),
        (THERE, "connection refused"),
        (HERE, "of another fleet"),
        (HERE, "no welcome within 5 s"),
        (HERE, "connection refused"),
    ]


def test_what_has_answered_since_fails_anew(failures: Failures) -> None:
    with capture_logs() as logs:
        unreached(failures)
        unreached(failures)
        failures.over(HERE)
        unreached(failures)
    assert [each.get("times") for each in logs] == [None, None]


def test_a_reason_that_a_write_has_lost_is_no_new_one(clock: Clock, failures: Failures) -> None:
    """A standby refuses every attempt, and half of the refusals arrive while the agent writes."""
    with capture_logs() as logs:
        for second in range(60):
            clock.now = 1000.0 + second
            why, code = (
                ("not the leader", grpc.StatusCode.FAILED_PRECONDITION)
                if second % 2 == 0
                else ("Internal error from Core", grpc.StatusCode.INTERNAL)
            )
            unreached(failures, code=code, why=why)
        unreached(failures, THERE, grpc.StatusCode.INTERNAL, "Internal error from Core")
    assert [each["reason"] for each in logs] == [
        "not the leader",
        "the service ended the call while this agent wrote to it, so its reason is not known",
    ]
