"""The datagram socket that receives the messages of every worker of this node."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.lowlevel

from holdfast.agent.workers.apart import open_to
from holdfast.agent.workers.senders import CREDENTIALS, ask_for_credentials, sender_of
from holdfast.domain.errors import HoldfastError
from holdfast.domain.notes import Note, parse
from holdfast.domain.worker import MESSAGE_BYTES_MAX
from holdfast.runtime.processes.training_user import TrainingUser

BUFFER_BYTES = 4 << 20
BURST_MAX = 256  # notes taken before other tasks get a turn


class NotesInbox:
    """Binds `path` at once. `run` passes every valid note to `take`, with the pid of its sender and its text. Malformed
    messages are counted in `refused`. `user`: that of the workers, if it is not the agent's; otherwise the pid is 0."""

    def __init__(self, path: Path, take: Callable[[Note, int, bytes], None], user: TrainingUser | None = None) -> None:
        self._path = path
        # No room for anything else, so that no sender hands over descriptors
        self._ancillary_bytes = 0 if user is None else socket.CMSG_SPACE(CREDENTIALS.size)
        self._take = take
        self.refused = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        path.unlink(missing_ok=True)  # left by an earlier agent: the directory is locked by this process
        try:
            if user is not None:
                ask_for_credentials(self._socket)
            self._socket.bind(str(path))
            open_to(path, user)
        except OSError as error:
            self._socket.close()
            raise HoldfastError(
                f"cannot create the notes socket {path}: {error}; is the path over 107 bytes?"
            ) from error

    async def run(self) -> None:
        try:
            while True:
                await anyio.wait_readable(self._socket)
                self.drain()
                await anyio.lowlevel.checkpoint()
        finally:
            self._socket.close()
            self._path.unlink(missing_ok=True)

    def drain(self) -> None:
        """Read the received messages. Called before a worker's exit is evaluated, so that its last messages count."""
        if self._socket.fileno() < 0:
            return  # the agent is stopping: `run` has ended before the workers do
        for _ in range(BURST_MAX):
            try:
                raw, ancillary, _, _ = self._socket.recvmsg(MESSAGE_BYTES_MAX, self._ancillary_bytes)
            except BlockingIOError:
                return
            note = parse(raw)
            if note is None:
                self.refused += 1
            else:
                self._take(note, sender_of(ancillary), raw)
