"""Serves `RankMonitorClient` of nvidia-resiliency-ext, so that scripts that use it run as under its own launcher.

All workers of this node use one Unix socket, whose path is in `FT_RANK_MONITOR_IPC_SOCKET`. A connecting process is identified
by the kernel (SO_PEERCRED), not by its message. An overdue rank (`ft_timeouts`) is killed by SIGKILL, as by the client's own
monitor. The rank's log contains the reason, and the supervisor decides what follows from the exit. A malformed message is
answered with an error and ends the connection. It neither stops the agent nor loads unknown objects (`ft_messages`)."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import anyio
import structlog
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from holdfast.agent.workers import ft_messages as messages
from holdfast.agent.workers.apart import open_to
from holdfast.agent.workers.ft_messages import Authkey, Init, Timeouts
from holdfast.agent.workers.ft_timeouts import SAFETY_FACTOR, Watch
from holdfast.agent.workers.procfs import parent_of
from holdfast.domain.errors import HoldfastError, InvalidSpec, MalformedMessage
from holdfast.runtime.processes.training_user import TrainingUser

log = structlog.get_logger("holdfast.agent.ft")

# Variables of the job's environment, named like the launcher's options.
ENV_SECTIONS = "FT_RANK_SECTION_TIMEOUTS"
ENV_OUT_OF_SECTION = "FT_RANK_OUT_OF_SECTION_TIMEOUT"
ENV_HEARTBEAT = "FT_RANK_HEARTBEAT_TIMEOUT"
ENV_INITIAL = "FT_INITIAL_RANK_HEARTBEAT_TIMEOUT"

CHECK_INTERVAL_S = 0.25
ANCESTORS_MAX = 32  # generations between a process of the script and its worker


@dataclass(frozen=True, slots=True)
class Rank:
    """A worker that may connect. `least_s`: the shortest timeout if neither the job nor the script sets one."""

    job: str
    generation: int
    rank: int
    pid: int
    environment: Mapping[str, str]
    least_s: float


def timeouts_of(environment: Mapping[str, str]) -> Timeouts:
    """Parse the job's variables: `setup:600,step:180,save:` (without a number, the timeout is learned). Raises `InvalidSpec`
    that names the variable."""
    sections = {}
    text = environment.get(ENV_SECTIONS, "").strip()
    for part in text.split(",") if text else ():
        name, _, seconds = part.partition(":")
        if not name.strip():
            raise InvalidSpec(ENV_SECTIONS, text, "sections and seconds, such as setup:600,step:180")
        sections[name.strip()] = _seconds(ENV_SECTIONS, seconds)
    return Timeouts(
        initial=_seconds(ENV_INITIAL, environment.get(ENV_INITIAL, "")),
        subsequent=_seconds(ENV_HEARTBEAT, environment.get(ENV_HEARTBEAT, "")),
        sections=sections,
        out_of_section=_seconds(ENV_OUT_OF_SECTION, environment.get(ENV_OUT_OF_SECTION, "")),
    )


def _seconds(name: str, text: str) -> float | None:
    if text.strip().lower() in ("", "none", "null"):
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InvalidSpec(name, text, "seconds greater than 0, or nothing")
    return seconds


class FtServer:
    """Binds `path` at once. `ranks` returns the running workers. `overdue` is called once for an overdue rank, with a
    reason."""

    def __init__(
        self,
        path: Path,
        ranks: Callable[[], list[Rank]],
        overdue: Callable[[Rank, str], None],
        user: TrainingUser | None = None,
    ) -> None:
        self._path, self._ranks, self._end = path, ranks, overdue
        self._watches: dict[object, tuple[Rank, Watch]] = {}
        path.unlink(missing_ok=True)  # left by an earlier agent: the directory is locked by this process
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            self._socket.bind(str(path))
            open_to(path, user)
            self._socket.listen(128)
        except OSError as error:
            self._socket.close()
            raise HoldfastError(f"cannot create the socket {path}: {error}; is the path over 107 bytes?") from error

    async def run(self) -> None:
        """A loop for the agent's task group."""
        listener = await anyio.abc.SocketListener.from_socket(self._socket)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._check)
                await listener.serve(self._serve)
        finally:
            self._path.unlink(missing_ok=True)

    def unheard(self) -> None:
        """Restart all intervals, because this agent was frozen and a missing message proves nothing."""
        for _, watch in self._watches.values():
            watch.unheard(monotonic())

    async def _check(self) -> None:
        while True:
            await anyio.sleep(CHECK_INTERVAL_S)
            self.look(monotonic())

    def look(self, now: float) -> None:
        """End the ranks that are overdue."""
        for key, (rank, watch) in list(self._watches.items()):
            if reason := watch.overdue(now):
                del self._watches[key]
                self._end(rank, reason)

    async def _serve(self, stream: SocketStream) -> None:
        key = object()
        try:
            async with stream:
                with suppress(
                    anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, anyio.ClosedResourceError
                ):
                    await self._converse(stream, key)
        finally:
            self._watches.pop(key, None)

    async def _converse(self, stream: SocketStream, key: object) -> None:
        received = BufferedByteReceiveStream(stream)
        while True:
            try:
                size = int.from_bytes(await received.receive_exactly(messages.HEAD_BYTES), "big")
                if size > messages.MESSAGE_BYTES_MAX:
                    raise MalformedMessage("size", f"{size} bytes are more than {messages.MESSAGE_BYTES_MAX}")
                answer = self._answer(messages.decode(await received.receive_exactly(size)), stream, key)
            except HoldfastError as error:
                log.warning("message of a rank monitor's client refused", reason=str(error))
                await stream.send(messages.error(f"holdfast: {error}"))
                return
            await stream.send(answer)

    def _answer(self, message: messages.Message, stream: SocketStream, key: object) -> bytes:
        match message:
            case Authkey():
                return messages.ok()
            case Init():
                rank = self._rank_of(_peer(stream))
                timeouts = timeouts_of(rank.environment)
                now = monotonic()
                self._watches[key] = (rank, Watch(timeouts, rank.least_s, now))
                log.info("rank monitor's client connected", job=rank.job, rank=rank.rank, client=message.version)
                return messages.ok_with_config(timeouts, SAFETY_FACTOR)
        known = self._watches.get(key)
        if known is None:
            raise MalformedMessage("InitMsg", "must precede this message")
        problem = known[1].fold(message, monotonic())
        return messages.error(problem) if problem else messages.ok()

    def _rank_of(self, pid: int) -> Rank:
        by_pid = {rank.pid: rank for rank in self._ranks()}
        for _ in range(ANCESTORS_MAX):
            if pid in by_pid:
                return by_pid[pid]
            if pid <= 1:
                break
            pid = parent_of(pid)
        raise MalformedMessage("pid", "does not belong to a worker of this node")


def _peer(stream: SocketStream) -> int:
    raw = stream.extra(SocketAttribute.raw_socket).getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    pid: int = struct.unpack("3i", raw)[0]
    return pid


def append_to_log(path: Path, line: str) -> None:
    """Append a line to a rank's log. The report of the rank's exit contains the last lines of the log."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(fd, f"holdfast: {line}\n".encode(errors="replace"))
    finally:
        os.close(fd)
