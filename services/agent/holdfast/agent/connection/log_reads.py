"""Answers requests of the API for a part of a rank's log, or for the exceptions of ranks. One request is read at a time, in a
thread, so that a file system that hangs delays only such requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from holdfast.agent.workers.logs import read_errors, read_part
from holdfast.domain.errors import HoldfastError
from holdfast.v1 import control_pb2 as pb
from holdfast.wire import rank_reads
from holdfast.wire.worker_logs import decode_request, encode_answer

WAITING_MAX = 32  # requests; more are answered at once, with the reason

Question = pb.ReadLog | pb.ReadErrors


class LogReads:
    """`logs`: the directory of the agent's logs. Requests and answers belong to one session: `forget` begins the next one."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._limiter = anyio.CapacityLimiter(1)
        self._waiting: deque[Question] = deque()
        self._asked = anyio.Event()
        self.answers: deque[pb.AgentMessage] = deque()  # to be sent

    def forget(self) -> None:
        self._waiting.clear()
        self.answers.clear()

    def ask(self, message: Question) -> None:
        if len(self._waiting) >= WAITING_MAX:
            self.answers.append(
                _refused(message, f"{WAITING_MAX} requests for logs wait on this node; ask again later")
            )
            return
        self._waiting.append(message)
        self._asked.set()

    async def run(self, answered: Callable[[], None]) -> None:
        """Answer until cancelled. `answered` is called when there are answers to send."""
        while True:
            while self._waiting:
                message = self._waiting.popleft()
                self.answers.append(await self._answer(message))
                answered()
            self._asked = anyio.Event()
            await self._asked.wait()

    async def _answer(self, message: Question) -> pb.AgentMessage:
        try:
            answer = partial(_read, self._logs, message)
            return await anyio.to_thread.run_sync(answer, abandon_on_cancel=True, limiter=self._limiter)
        except HoldfastError as error:
            return _refused(message, str(error))


def _read(logs: Path, message: Question) -> pb.AgentMessage:
    if isinstance(message, pb.ReadLog):
        return encode_answer(message.id, read_part(logs, decode_request(message)))
    return rank_reads.encode_errors(message.id, read_errors(logs, *rank_reads.decode_errors_request(message)))


def _refused(message: Question, reason: str) -> pb.AgentMessage:
    refuse = encode_answer if isinstance(message, pb.ReadLog) else rank_reads.encode_errors
    return refuse(message.id, reason)
