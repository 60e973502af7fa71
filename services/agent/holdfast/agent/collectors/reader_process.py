"""A collector whose source is read by a separate process, because a driver or library may hang.

The process prints one JSON object per line. No line within the deadline is a missed deadline. After `MISSES_MAX` of them the
process is restarted, because a process that hangs in a driver does not recover when the driver does."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from time import time
from typing import IO, Any

import anyio
import structlog

from holdfast.agent.collectors.protocol import Emit
from holdfast.domain.signals import CollectorSilent, NodeSignal
from holdfast.runtime import freeze
from holdfast.runtime.processes.children import Child, running, spawn

log = structlog.get_logger("holdfast.agent.reader")

MISSES_MAX = 4
LINE_BYTES_MAX = 256 << 10
# Exceptions of reading a malformed record.
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError)


class ReaderProcess(ABC):
    """`rejections`: counts of skipped lines by reason."""

    name: str

    def __init__(self, node: str, *, deadline_s: float) -> None:
        self._node, self._deadline_s = node, deadline_s
        self._unread = b""  # the newest line that is not a record; contains the reason if the process exits
        self.rejections: Counter[str] = Counter()

    @abstractmethod
    def command(self) -> Sequence[str]:
        """Return the command line."""

    @abstractmethod
    def signals(self, record: Mapping[str, Any]) -> list[NodeSignal]:
        """Convert one record to signals. May raise the exceptions of a malformed record."""

    def environment(self) -> Mapping[str, str] | None:
        """Environment of the process; None = inherited."""
        return None

    async def run(self, emit: Emit) -> None:
        """Read the process's output. Raises `OSError` if it exits or must be replaced."""
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(ours, "rb", buffering=0) as pipe:
            try:
                child = spawn(f"{self.name}-reader", self.command(), env=self.environment(), output=theirs)
            finally:
                os.close(theirs)
            async with running(child, stop_grace_s=0.0):
                await self._read(child, pipe, emit)

    async def _read(self, child: Child, pipe: IO[bytes], emit: Emit) -> None:
        misses = 0
        buffer = b""
        while misses < MISSES_MAX:
            raw: bytes | None = None
            with freeze.patience(self._deadline_s):
                await anyio.wait_readable(pipe)
                raw = pipe.read(LINE_BYTES_MAX)
            if raw is None:
                misses += 1
                reason = f"no output of the {self.name} reader within {self._deadline_s:g} s"
                emit(CollectorSilent(self._node, time(), self.name, misses, reason))
                continue
            if not raw:
                code = await child.wait()
                raise OSError(f"the {self.name} reader ended with code {code}: {self._last_output(buffer)}")
            *lines, buffer = (buffer + raw).split(b"\n")
            buffer = buffer[-LINE_BYTES_MAX:]
            for line in lines:
                for signal in self.take(line):
                    misses = 0
                    emit(signal)
        raise OSError(f"the {self.name} reader (pid {child.pid}) missed {misses} deadlines in a row and is replaced")

    def take(self, line: bytes) -> list[NodeSignal]:
        """Parse one line. A malformed line is counted, logged and skipped."""
        try:
            return self.signals(json.loads(line))
        except _UNREADABLE as error:
            self._unread = line
            self.reject("garbage", line=line[:200], reason=repr(error))
            return []

    def reject(self, what: str, **details: object) -> None:
        """Count a rejection, and log the 1st, 2nd, 4th, 8th …"""
        self.rejections[what] += 1
        if self.rejections[what].bit_count() == 1:
            log.warning("answer rejected", reader=self.name, what=what, so_far=self.rejections[what], **details)

    def _last_output(self, buffer: bytes) -> str:
        return (buffer or self._unread).decode(errors="replace").strip()[-500:] or "no output"


def word(value: Any, chars_max: int = 96) -> str:
    """Return text that protobuf accepts; JSON can contain lone surrogates."""
    return str(value)[:chars_max].encode(errors="replace").decode()


def within(value: Any, low: int, high: int) -> int:
    """Raises ValueError for a number that a message cannot contain, because a driver's answers are not trusted."""
    number = int(value)
    if not low <= number < high:
        raise ValueError(f"{number} is out of range")
    return number
