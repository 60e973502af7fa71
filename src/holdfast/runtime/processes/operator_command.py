"""Runs a command line that the operator has configured, without a shell: with a limit, and its output in the answer."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from typing import IO

import anyio

from holdfast.domain.errors import Unavailable
from holdfast.runtime.processes.children import Child, running, spawn

OUTPUT_CHARS_MAX = 500
_READ_BYTES = 64 << 10


def exists(line: str) -> bool:
    """Whether there is a command, and its program is on this machine."""
    words = shlex.split(line)
    return bool(words) and shutil.which(words[0]) is not None


async def run(name: str, command: Sequence[str], timeout_s: float) -> str:
    """Run the command and return the end of its output. At the limit, the command and its child processes are killed.

    `name` is its name in the log. Raises `Unavailable`, with the end of the output, if it fails or does not end in time.
    """
    ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(ours, "rb", buffering=0) as pipe:
        try:
            child = spawn(name, command, output=theirs)
        finally:
            os.close(theirs)
        output = _Tail()
        code: int | None = None
        async with running(child, stop_grace_s=0.0), anyio.create_task_group() as tasks:
            tasks.start_soon(output.read, pipe)
            with anyio.move_on_after(timeout_s):
                code = await child.wait()
            if code is None:
                await _end(child)
            tasks.cancel_scope.cancel()
        output.drain(pipe)
    shown = shlex.join(command)
    if code is None:
        raise Unavailable(f"`{shown}` did not end within {timeout_s:g} s and was killed{output.quoted}")
    if code != 0:
        raise Unavailable(f"`{shown}` {_ended(code)}{output.quoted}")
    return output.text


async def _end(child: Child) -> None:
    with anyio.CancelScope(shield=True):
        await child.stop(0.0)


def _ended(code: int) -> str:
    return f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


class _Tail:
    """The end of a command's output."""

    def __init__(self) -> None:
        self._bytes = b""

    async def read(self, pipe: IO[bytes]) -> None:
        """Read until the end of the output, or until cancelled."""
        while True:
            await anyio.wait_readable(pipe)
            if not self._take(pipe):
                return

    def drain(self, pipe: IO[bytes]) -> None:
        """Read the output that has been written already."""
        while self._take(pipe):
            pass

    def _take(self, pipe: IO[bytes]) -> bool:
        raw = pipe.read(_READ_BYTES)
        self._bytes = (self._bytes + (raw or b""))[-4 * OUTPUT_CHARS_MAX :]
        return bool(raw)

    @property
    def text(self) -> str:
        output = self._bytes.decode(errors="replace").replace("\0", "")
        return " ".join(output.split())[-OUTPUT_CHARS_MAX:]

    @property
    def quoted(self) -> str:
        return f": {self.text}" if self.text else ", without output"
