"""The services' event loop takes a burst of gRPC's wake-ups at once, and leaves every other reader alone."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable

from holdfast.runtime.loop import ServiceLoop

BURST = 100

# Says whether the reader that gRPC registers is one that the loop knows; in a process of its own, whose loops are its own.
PROBE = """
import asyncio, grpc
from holdfast.runtime import loop
known = []
class Loop(loop.ServiceLoop):
    def add_reader(self, fd, callback, *args):
        known.append(loop._is_of_completions(callback))
        super().add_reader(fd, callback, *args)
async def main():
    grpc.aio.server()
with asyncio.Runner(loop_factory=Loop) as runner:
    runner.run(main())
assert any(known), known
"""


class PollerCompletionQueue:
    """Reads one byte each time that it is called, as gRPC's does."""

    def __init__(self, wakeups: socket.socket) -> None:
        self._wakeups = wakeups
        self.calls = 0

    def handle(self) -> None:
        assert self._wakeups.recv(1)
        self.calls += 1


class Other(PollerCompletionQueue):
    """Not gRPC's."""


def calls_for_a_burst(kind: Callable[[socket.socket], PollerCompletionQueue]) -> int:
    async def main() -> int:
        read, write = socket.socketpair()
        with read, write:
            read.setblocking(False)
            reader = kind(read)
            write.send(b"1" * BURST)
            loop = asyncio.get_running_loop()
            loop.add_reader(read, reader.handle)
            for _ in range(2 * BURST):
                await asyncio.sleep(0)  # a turn of the loop
            loop.remove_reader(read)
            return reader.calls

    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        return runner.run(main())


def test_a_burst_of_wake_ups_is_one_call() -> None:
    assert calls_for_a_burst(PollerCompletionQueue) == 1


def test_another_reader_is_called_as_often_as_there_is_something_to_read() -> None:
    assert calls_for_a_burst(Other) == BURST


def test_grpc_is_recognised() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
