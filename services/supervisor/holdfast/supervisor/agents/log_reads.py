"""Parts of logs that were asked of an agent in its session, and have not been answered yet."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import anyio

from holdfast.domain.errors import Conflict, HoldfastError
from holdfast.domain.worker_logs import LogPart, LogRequest
from holdfast.v1 import control_pb2 as pb
from holdfast.wire.worker_logs import decode_answer, encode_request

WAITING_MAX = 16  # of one node; readers of logs must not fill the session's queue
ANSWER_TIMEOUT_S = 3.0


class _Read:
    def __init__(self) -> None:
        self.answered = anyio.Event()
        self.answer: LogPart | HoldfastError | None = None


class LogReads:
    """Of one session."""

    def __init__(self, node: str, offer: Callable[[pb.SupervisorMessage], None]) -> None:
        self._node, self._offer = node, offer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Read] = {}

    async def read(self, request: LogRequest, ended: anyio.Event) -> LogPart:
        """Raises what the agent says against it, and `Conflict` without an answer; `ended`: the session is over."""
        if len(self._waiting) >= WAITING_MAX:
            raise Conflict(f"{WAITING_MAX} requests for logs wait for {self._node}; ask again in a moment")
        number, read = next(self._numbers), _Read()
        self._waiting[number] = read
        try:
            self._offer(encode_request(number, request))
            with anyio.move_on_after(ANSWER_TIMEOUT_S):
                async with anyio.create_task_group() as tasks:

                    async def until(event: anyio.Event) -> None:
                        await event.wait()
                        tasks.cancel_scope.cancel()

                    tasks.start_soon(until, read.answered)
                    tasks.start_soon(until, ended)
        finally:
            del self._waiting[number]
        if isinstance(read.answer, HoldfastError):
            raise read.answer
        if read.answer is None:
            why = "its session has ended" if ended.is_set() else f"no answer within {ANSWER_TIMEOUT_S:g} s"
            raise Conflict(
                f"the agent of {self._node} has not sent the log: {why}; an agent of an earlier version cannot"
            )
        return read.answer

    def take(self, message: pb.LogRead) -> None:
        """An answer; one that is too late, doubled, or that nobody has asked for, counts for nothing."""
        read = self._waiting.get(message.id)
        if read is None or read.answered.is_set():
            return
        try:
            read.answer = decode_answer(message)
        except HoldfastError as error:
            read.answer = error
        read.answered.set()
