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
from dataclasses import dataclass
from pathlib import Path

import anyio

from holdfast.agent.workers.entry import Entry
from holdfast.agent.workers.orphans import end_orphans
from holdfast.agent.workers.template import Forked, Template, receive
from holdfast.domain import template as template_protocol
from holdfast.domain import worker as protocol
from holdfast.domain.errors import Unavailable
from holdfast.domain.nodes import RunningWorker
from holdfast.runtime import freeze

STATUS_TIMEOUT_S = 1.0  # from the process's end to the reaper's word; it comes within a millisecond


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker ended: by exit code or by signal. `at` is Unix seconds, `uptime_s` the same by the monotonic clock."""

    at: float
    exit_code: int | None
    signal: int | None
    uptime_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    job: str
    generation: int
    rank: int
    local_rank: int
    log_path: Path
    error_path: Path


class Worker:
    """Made by `launch`; `watch`, then `clear`, must run to their ends."""

    def __init__(self, identity: WorkerIdentity, control: socket.socket, forked: Forked) -> None:
        self.identity = identity
        self.pid = forked.pid
        self.since = time.time()  # Unix seconds, when it was forked
        self.expected = False  # the agent told it to stop: its end is no fault
        self.gone = anyio.Event()
        self.cleared = anyio.Event()  # gone, and everything that it started as well
        self.exit: Exit | None = None
        self._control = control
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
        """Fork it. Raises `Unavailable` when the template cannot. It waits for `start`."""
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
        """Until it waits for `start`. Raises `Unavailable` when it died instead."""
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
            if protocol.decode(raw).get("type") == "ready":
                return

    def tell(self, kind: str, **fields: object) -> bool:
        """Send an order without waiting; False when the worker does not take it (dead, or its channel is full)."""
        try:
            self._control.send(protocol.encode(kind, **fields))
        except OSError:
            return False
        return True

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal it through its pidfd, which can never mean another process. The reaper ends what it has started."""
        if self.alive:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass  # it has just gone: `watch` will say so

    async def watch(self) -> Exit:
        """Until the process is gone; returns how it ended. Call once."""
        await anyio.wait_readable(self._pidfd)
        at, uptime_s = time.time(), time.monotonic()
        signal.pidfd_send_signal(self._reaper, signal.SIGCONT)  # somebody may have stopped it
        with freeze.patience(STATUS_TIMEOUT_S):
            await self._hear("exited")
        if self.exit is None:
            self.exit = Exit(at, None, signal.SIGKILL, uptime_s)
        self.gone.set()
        self._control.close()
        os.close(self._pidfd)
        return self.exit

    async def clear(self) -> None:
        """After `watch`: until nothing that it started is left. Call once."""
        orderly = await self._hear("cleared")
        self._link.close()
        signal.pidfd_send_signal(self._reaper, signal.SIGKILL)  # it has ended, or closed its link and nothing else
        await anyio.wait_readable(self._reaper)
        _reap(self._reaper)
        if not orderly:  # it was killed: what was below it is ours
            await end_orphans()
        self.cleared.set()

    async def _hear(self, kind: str) -> bool:
        """Until the reaper has said `kind`; False when it has ended without."""
        while raw := (await receive(self._link))[0]:
            message = template_protocol.decode(raw)
            if message["type"] == "exited":
                self.exit = Exit(message["at"], message["exit_code"], message["signal"], message["uptime_s"])
            if message["type"] == kind:
                return True
        return False


def _reap(pidfd: int) -> None:
    """A child of ours that has ended."""
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    os.close(pidfd)
