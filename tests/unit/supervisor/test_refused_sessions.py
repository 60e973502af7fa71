"""Sessions that a standby refuses: each agent sees the reason, and the log is not filled with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import structlog.testing
from supervising import facts

from holdfast.domain.orders import Hello
from holdfast.supervisor.agents.control import NOT_THE_LEADER, ControlServicer, Received
from holdfast.wire.control import encode_report

pytestmark = pytest.mark.anyio


class Context:
    """Of one call. `read`: how many of the agent's messages were read when it was refused."""

    def __init__(self, host: int) -> None:
        self.host, self.read = host, 0
        self.refused: list[tuple[grpc.StatusCode, str, int]] = []

    def peer(self) -> str:
        return f"ipv4:10.0.0.{self.host}:40000"

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.refused.append((code, details, self.read))

    async def messages(self) -> AsyncIterator[Received]:
        message = encode_report(Hello(facts(f"n{self.host}")), 1)
        self.read += 1
        yield Received(message, message.SerializeToString())


async def test_a_standby_reads_the_greeting_before_it_refuses_and_says_so_once_for_all_agents() -> None:
    """grpc.aio replaces the reason of a call that ends while the agent writes: a refusal must not meet the greeting."""
    servicer = ControlServicer(lambda: None, supervisor="sup-2", diagnostics=(), clock=lambda: 0.0)
    calls: list[Any] = [Context(host) for host in range(1, 101)]
    with structlog.testing.capture_logs() as lines:
        for call in calls:
            await servicer.Session(call.messages(), call)
    assert [call.refused for call in calls] == [[(grpc.StatusCode.FAILED_PRECONDITION, NOT_THE_LEADER, 1)]] * 100
    assert [(each["event"], each["reason"]) for each in lines] == [("session refused", NOT_THE_LEADER)]
