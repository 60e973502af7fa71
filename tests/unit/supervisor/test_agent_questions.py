"""Parts of logs that are asked of an agent: answers, silence, the end of the session, and answers that nobody has asked for."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import pytest
from waiting import wait_until_async

from holdfast.domain.errors import Conflict, HoldfastError, NotFound
from holdfast.domain.worker_logs import PART_BYTES_MAX, LogPart, LogRequest
from holdfast.supervisor.agents import questions
from holdfast.supervisor.agents.questions import WAITING_MAX, Questions
from holdfast.v1 import control_pb2 as pb
from holdfast.wire.worker_logs import decode_answer, encode_answer, encode_request

pytestmark = pytest.mark.anyio
REQUEST = LogRequest("llm", 1, 0, 0)


class Asked:
    """A session of a node, and what was asked of its agent."""

    def __init__(self) -> None:
        self.sent: list[pb.SupervisorMessage] = []
        self.ended = anyio.Event()
        self.reads = Questions[LogPart]("n1", "the log", self.sent.append)

    async def wait(self) -> LogPart:
        return await self.reads.ask(lambda number: encode_request(number, REQUEST), self.ended)

    async def read(self, meanwhile: Callable[[int], None]) -> LogPart | HoldfastError:
        """The outcome; `meanwhile` gets the number of the request once it was sent."""
        outcome: list[LogPart | HoldfastError] = []

        async def ask() -> None:
            try:
                outcome.append(await self.wait())
            except HoldfastError as error:
                outcome.append(error)

        before = len(self.sent)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await wait_until_async(lambda: len(self.sent) > before, description="the request")
            meanwhile(self.sent[-1].read_log.id)
        return outcome[0]

    def answer(self, number: int, answer: LogPart | str) -> None:
        read = encode_answer(number, answer).log_read
        self.reads.take(read.id, lambda: decode_answer(read))


async def test_the_answer_of_the_agent() -> None:
    asked = Asked()
    part = LogPart(5, 9, b"text")
    assert await asked.read(lambda number: asked.answer(number, part)) == part
    found = await asked.read(lambda number: asked.answer(number, "there is no such log"))
    assert isinstance(found, NotFound)
    assert "no such log" in str(found)


async def test_an_answer_to_something_else_counts_for_nothing() -> None:
    asked = Asked()
    part = LogPart(0, 1, b"x")

    def answers(number: int) -> None:
        asked.answer(number + 1, LogPart(0, 1, b"y"))
        asked.answer(number, part)
        asked.answer(number, LogPart(0, 1, b"z"))

    assert await asked.read(answers) == part


async def test_more_than_was_asked_for_is_an_error() -> None:
    asked = Asked()
    large = LogPart(0, 1, bytes(PART_BYTES_MAX + 1))
    assert "log_read.data" in str(await asked.read(lambda number: asked.answer(number, large)))


async def test_silence_and_the_end_of_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    ended = await asked.read(lambda _: asked.ended.set())
    assert isinstance(ended, Conflict)
    assert "session has ended" in str(ended)
    monkeypatch.setattr(questions, "ANSWER_TIMEOUT_S", 0.01)
    silent = await Asked().read(lambda _: None)
    assert isinstance(silent, Conflict)
    assert "an agent of an earlier version cannot" in str(silent)


async def test_readers_of_logs_do_not_fill_the_queue_of_orders() -> None:
    asked = Asked()
    async with anyio.create_task_group() as tasks:
        for _ in range(WAITING_MAX):
            tasks.start_soon(asked.wait)
        await wait_until_async(lambda: len(asked.sent) == WAITING_MAX, description="the requests")
        with pytest.raises(Conflict, match="ask again"):
            await asked.wait()
        assert len(asked.sent) == WAITING_MAX
        tasks.cancel_scope.cancel()
    asked.ended = anyio.Event()
    part = LogPart(0, 1, b"x")
    assert await asked.read(lambda number: asked.answer(number, part)) == part, "those that were given up take no place"
