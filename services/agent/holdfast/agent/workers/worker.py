"""One worker process in the agent: identity, control channel, exit.

Its exit is observed twice: the pidfd becomes readable when the process has exited, and the reaper, its parent, reports the
exit status. The reaper then kills the processes that the worker has started. Only after that is the worker `cleared`, which
provides the fencing (no two generations run at once). A worker whose reaper was killed is recorded as killed by SIGKILL."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from holdfast.agent.workers.entry import Entry
from holdfast.agent.workers.forked import Forked
from holdfast.agent.workers.orphans import end_orphans
from holdfast.agent.workers.template import Template, receive
from holdfast.domain import template as template_protocol
from holdfast.domain import worker as protocol
from holdfast.domain.errors import Conflict, Unavailable
from holdfast.domain.nodes import RunningWorker
from holdfast.runtime import freeze

STATUS_TIMEOUT_S = 1.0  # from the process's end to the reaper's message, which normally takes less than a millisecond


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker ended: by exit code or by signal. The time is `at` in Unix seconds, and `uptime_s` in monotonic seconds.
    `left`: command lines of processes that still ran when it ended with code 0."""

    at: float
    exit_code: int | None
    signal: int | None
    uptime_s: float = 0.0
    left: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    job: str
    generation: int
    rank: int
    local_rank: int
    log_path: Path
    error_path: Path


class Worker:
    """Created by `launch`. `watch` and then `clear` must run to their ends."""

    def __init__(self, identity: WorkerIdentity, control: socket.socket, forked: Forked) -> None:
        self.identity = identity
        self.pid = forked.pid
        self.since = time.time()  # time of the fork, Unix seconds
        self.expected = False  # the agent has ordered the stop, so the exit is not a fault
        self.gone = anyio.Event()  # the process has exited
        self.cleared = anyio.Event()  # also all processes that it has started
        self.exit: Exit | None = None
        self.votes = False  # its library answers proposals of saves; known when it is ready
        self._control = control
        self._ballots = 0
        self._votes: dict[int, bool | None] = {}  # ballot → the rank's answer; None = not here yet
        self._reading = anyio.Lock()
        self._pidfd = forked.pidfd
        self._link = forked.link
        self._reaper = forked.reaper

    @classmethod
    async def launch(
        cls,
        template: Template,
        identity: WorkerIdentity,
        *,
        entry: Entry,
        env: Mapping[str, str],
        log_fd: int,
    ) -> Worker:
        """Fork a worker, which then waits for `start`. Raises `Unavailable` if the template cannot fork."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            forked = await template.fork(
                kind=entry.kind,
                target=entry.target,
                args=entry.args,
                cwd=entry.cwd,
                env=env,
                fds=(theirs.fileno(), log_fd, log_fd),
            )
            return cls(identity, ours, forked)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    @property
    def running(self) -> RunningWorker:
        identity = self.identity
        return RunningWorker(identity.job, identity.generation, identity.rank, self.pid, self.since)

    @property
    def alive(self) -> bool:
        return not self.gone.is_set()

    async def wait_ready(self) -> None:
        """Return when the worker waits for `start`. Raises `Unavailable` if it exited instead."""
        while True:
            try:
                raw = self._control.recv(protocol.MESSAGE_BYTES_MAX)
            except BlockingIOError:
                await anyio.wait_readable(self._control)
                continue
            except ConnectionResetError:
                raw = b""
            if not raw:
                raise Unavailable(f"rank {self.identity.rank} (pid {self.pid}) died before it was ready")
            message = protocol.decode(raw)
            if message.get("type") == "ready":
                self.votes = message.get("votes") is True
                return

    async def agree(self, at_step: int) -> None:
        """Propose a save at `at_step`, and return when the rank has promised to wait there for the result.

        Raises `Conflict` if the rank has passed the step, `Unavailable` if it exits or does not accept orders."""
        self._ballots += 1
        ballot, rank = self._ballots, f"rank {self.identity.rank} of {self.identity.job}"
        if not self.tell("checkpoint_now", at_step=at_step, ballot=ballot):
            raise Unavailable(f"{rank} does not accept orders (pid {self.pid})")
        self._votes[ballot] = None
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._cancel_when_gone, tasks.cancel_scope)
                while self._votes[ballot] is None:
                    await self._read_vote(ballot)
                tasks.cancel_scope.cancel()
        finally:
            yes = self._votes.pop(ballot)
        if yes is None:
            raise Unavailable(f"{rank} ended before it agreed to save step {at_step}")
        if not yes:
            raise Conflict(f"{rank} has passed step {at_step}")

    async def _cancel_when_gone(self, scope: anyio.CancelScope) -> None:
        await self.gone.wait()
        scope.cancel()

    async def _read_vote(self, ballot: int) -> None:
        """Read one message, unless another task has read the answer to `ballot` meanwhile. A rank can send anything."""
        async with self._reading:
            if self._votes[ballot] is not None:
                return
            try:
                raw = self._control.recv(protocol.MESSAGE_BYTES_MAX)
            except BlockingIOError:
                with suppress(anyio.ClosedResourceError):  # the process has exited
                    await anyio.wait_readable(self._control)
                return
            except OSError:
                raw = b""
            if not raw:  # the process has exited, or has closed its channel: it answers no more
                await anyio.sleep_forever()
            match protocol.decode(raw):
                case {"type": "vote", "ballot": int(which), "yes": bool(yes)} if which in self._votes:
                    self._votes[which] = yes

    def tell(self, kind: str, **fields: object) -> bool:
        """Send an order without waiting. Returns False if the worker has exited or its channel is full."""
        try:
            self._control.send(protocol.encode(kind, **fields))
        except OSError:
            return False
        return True

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal the worker through its pidfd, which never refers to another process. The reaper ends the processes that the
        worker has started."""
        if self.alive:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass  # the worker has just exited, which `watch` reports

    async def watch(self) -> Exit:
        """Wait until the process has exited, and return how. Call once."""
        await anyio.wait_readable(self._pidfd)
        at, uptime_s = time.time(), time.monotonic()
        signal.pidfd_send_signal(self._reaper, signal.SIGCONT)  # the reaper may have been stopped
        with freeze.patience(STATUS_TIMEOUT_S):
            await self._receive_until("exited")
        if self.exit is None:
            self.exit = Exit(at, None, signal.SIGKILL, uptime_s)
        self.gone.set()
        anyio.notify_closing(self._control)
        self._control.close()
        os.close(self._pidfd)
        return self.exit

    async def clear(self) -> None:
        """After `watch`, wait until all processes that the worker has started have exited. Call once."""
        orderly = await self._receive_until("cleared")
        self._link.close()
        signal.pidfd_send_signal(self._reaper, signal.SIGKILL)  # the reaper has ended, or has only closed its link
        await anyio.wait_readable(self._reaper)
        _reap(self._reaper)
        if not orderly:  # the reaper was killed, so its processes are now children of the agent
            await end_orphans()
        self.cleared.set()

    async def _receive_until(self, kind: str) -> bool:
        """Process the reaper's messages up to one of type `kind`. Returns False if the reaper has ended without it."""
        while raw := (await receive(self._link))[0]:
            try:
                message = template_protocol.decode(raw)
                if message["type"] == "exited":
                    self.exit = _exit_of(message)
            except (ValueError, KeyError, TypeError, RecursionError):
                return False  # not of the reaper: a process of the script has its descriptor
            if message["type"] == kind:
                return True
        return False


def _exit_of(message: Mapping[str, Any]) -> Exit:
    """Raises KeyError, TypeError or ValueError for what a reaper does not send."""
    code, number = message["exit_code"], message["signal"]
    if not all(value is None or type(value) is int for value in (code, number)):
        raise TypeError("an exit code or a signal that is no number")
    left = tuple(map(str, message.get("left", ())))
    return Exit(float(message["at"]), code, number, float(message["uptime_s"]), left)


def _reap(pidfd: int) -> None:
    """Reap a child process that has ended, and close the descriptor."""
    with suppress(ChildProcessError):  # two reports named the same process
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    os.close(pidfd)
