"""Questions that were asked of an agent in its session, and have not been answered yet."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

from holdfast.domain.errors import Conflict, HoldfastError
from holdfast.v1 import control_pb2 as pb

T = TypeVar("T")

WAITING_MAX = 16  # of one kind and node; whoever looks must not fill the session's queue
ANSWER_TIMEOUT_S = 3.0


class _Question(Generic[T]):
    def __init__(self) -> None:
        self.answered = anyio.Event()
        self.answer: T | HoldfastError | None = None


class Questions(Generic[T]):
    """Of one kind, in one session. `what`: what is asked for, as in "the agent has not sent the log"."""

    def __init__(self, node: str, what: str, offer: Callable[[pb.SupervisorMessage], None]) -> None:
        self._node, self._what, self._offer = node, what, offer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Question[T]] = {}

    async def ask(self, encode: Callable[[int], pb.SupervisorMessage], ended: anyio.Event) -> T:
        """`encode` makes the message of a number. Raises what the agent says against it, and `Conflict` without an answer;
        `ended`: the session is over."""
        if len(self._waiting) >= WAITING_MAX:
            raise Conflict(f"{WAITING_MAX} requests for {self._what} wait for {self._node}; ask again in a moment")
        number, question = next(self._numbers), _Question[T]()
        self._waiting[number] = question
        try:
            self._offer(encode(number))
            with anyio.move_on_after(ANSWER_TIMEOUT_S):
                async with anyio.create_task_group() as tasks:

                    async def until(event: anyio.Event) -> None:
                        await event.wait()
                        tasks.cancel_scope.cancel()

                    tasks.start_soon(until, question.answered)
                    tasks.start_soon(until, ended)
        finally:
            del self._waiting[number]
        if isinstance(question.answer, HoldfastError):
            raise question.answer
        if question.answer is None:
            why = "its session has ended" if ended.is_set() else f"no answer within {ANSWER_TIMEOUT_S:g} s"
            raise Conflict(
                f"the agent of {self._node} has not sent {self._what}: {why}; an agent of an earlier version cannot"
            )
        return question.answer

    def take(self, number: int, decode: Callable[[], T]) -> None:
        """An answer; one that is too late, doubled, or that nobody has asked for, counts for nothing."""
        question = self._waiting.get(number)
        if question is None or question.answered.is_set():
            return
        try:
            question.answer = decode()
        except HoldfastError as error:
            question.answer = error
        question.answered.set()
