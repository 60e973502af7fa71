"""One worker process as the agent sees it: identity, control channel, how it ends.

Its end is seen twice: the pidfd turns readable the moment the process is gone, and the template, its parent, says how it ended.
The first is what fences (nothing runs two generations), the second is what is reported. A worker whose template died with
it gets the verdict that the kernel carried out: SIGKILL.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import anyio

from holdfast.agent.workers.template import Exit, Template
from holdfast.domain import worker as protocol
from holdfast.domain.errors import Unavailable
from holdfast.domain.nodes import RunningWorker

STATUS_TIMEOUT_S = 1.0  # from the process's end to the template's word; it comes within a millisecond


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    job: str
    generation: int
    rank: int
    local_rank: int
    log_path: Path
    error_path: Path


class Worker:
    """Made by `launch`; `watch` must run until it returns the exit."""

    def __init__(self, identity: WorkerIdentity, control: socket.socket) -> None:
        self.identity = identity
        self.pid = 0
        self.since = 0.0  # Unix seconds, when it was forked
        self.expected = False  # the agent told it to stop: its end is no fault
        self.gone = anyio.Event()
        self.exit: Exit | None = None
        self._control = control
        self._told = anyio.Event()  # the template has said how it ended, or has itself ended
        self._pidfd = -1

    @classmethod
    async def launch(
        cls,
        template: Template,
        identity: WorkerIdentity,
        *,
        script: str,
        args: tuple[str, ...],
        cwd: str,
        env: Mapping[str, str],
        log_fd: int,
    ) -> Worker:
        """Fork it. Raises `Unavailable` when the template cannot. It waits for `start`."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        worker = cls(identity, ours)
        try:
            forked = await template.fork(
                script=script,
                args=args,
                cwd=cwd,
                env=env,
                fds=(theirs.fileno(), log_fd, log_fd),
                on_exit=worker._on_exit,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        worker.pid, worker._pidfd = forked.pid, forked.pidfd
        worker.since = time.time()
        return worker

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
        """Signal it through its pidfd, which can never mean another process. The template ends the rest of its group."""
        if self.alive:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass  # it has just gone: `watch` will say so

    async def watch(self) -> Exit:
        """Until the process is gone; returns how it ended. Call once."""
        try:
            await anyio.wait_readable(self._pidfd)
            at = time.time()
            with anyio.move_on_after(STATUS_TIMEOUT_S):
                await self._told.wait()
            if self.exit is None:
                self._kill_group()
                self.exit = Exit(at, None, signal.SIGKILL)
            return self.exit
        finally:
            self.gone.set()
            self._control.close()
            os.close(self._pidfd)

    def _kill_group(self) -> None:
        """What the template would have done; it is gone or does not answer."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def _on_exit(self, how: Exit | None) -> None:
        self.exit = how
        self._told.set()
