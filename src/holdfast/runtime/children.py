"""Child processes that cannot outlive this process.

Three mechanisms, because each alone is incomplete: `PR_SET_PDEATHSIG` kills the child when this process exits for any reason;
its own process group allows killing it with everything that it started; a pidfd reports its exit at once and never refers to
another process.

Two pitfalls. The kernel ties `PR_SET_PDEATHSIG` to the *thread* that forked, not to the process: a child started from a worker
thread would be killed when that thread ends, so only the main thread may start one. And `subprocess`'s `preexec_fn` runs the
at-fork handlers of gRPC, which abort the child when its threads are busy (seen: SIGABRT). So a few lines of Python between
this process and the program set the tie and then exec the program."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import anyio

from holdfast.domain.errors import NotFound

STOP_GRACE_S = 5.0

# argv: this process's pid, the program, its arguments. 1 is PR_SET_PDEATHSIG, 9 SIGKILL. A parent that exited before the call
# is detected by its pid. Costs 20 ms of start-up.
_TIE = """\
import ctypes, os, sys
if ctypes.CDLL(None).prctl(1, 9, 0, 0, 0):
    sys.exit("prctl(PR_SET_PDEATHSIG) failed")
if os.getppid() != int(sys.argv[1]):
    os._exit(137)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def tied(command: Sequence[str], *, thread_lasts: bool = False) -> list[str]:
    """Return the command line that runs `command` so that it gets SIGKILL when this process exits. Start it from the
    main thread.

    `thread_lasts`: the caller guarantees that the present thread outlives the child.
    """
    if not thread_lasts and threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "PR_SET_PDEATHSIG follows the thread that forks: a child started from this thread would be killed when the "
            "thread ends; start it from the main thread"
        )
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]


class Child:
    """A running child. `wait` may be called by several tasks; `stop` and `kill` take its whole process group."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._pidfd = os.pidfd_open(process.pid)
        self._waited_for: anyio.Event | None = None  # set by the waiter that watches the descriptor

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None until `wait` has returned."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait for the exit and return the exit code. The remaining processes of its group are killed."""
        while self._process.returncode is None:
            if self._waited_for is not None:  # the event loop allows only one waiter per descriptor
                await self._waited_for.wait()
                continue
            self._waited_for = anyio.Event()
            try:
                await anyio.wait_readable(self._pidfd)
                self._reap()
            finally:  # also when this waiter is cancelled; another one then takes its place
                waited_for, self._waited_for = self._waited_for, None
                waited_for.set()
        return self._process.returncode

    async def stop(self, grace_s: float = STOP_GRACE_S) -> int:
        """Send SIGTERM and, after `grace_s`, SIGKILL. Returns the exit code. A cancellation does not interrupt it."""
        try:
            self._signal(signal.SIGTERM)
            with anyio.move_on_after(grace_s):
                await self.wait()
        finally:
            self.kill()
            with anyio.CancelScope(shield=True):
                code = await self.wait()
        return code

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is not None:
            return  # reaped, so the number of its group may have been reused
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            pass  # no process is left in the group; wait() reaps the child

    def _reap(self) -> None:
        # While the leader is a zombie, its group's number is not reused, so the rest of the group can be killed without
        # a race.
        self._signal(signal.SIGKILL)
        self._process.wait()
        os.close(self._pidfd)


def spawn(
    name: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    output: IO[bytes] | int | None = None,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start `command` in its own process group, tied to this process. `output` receives its stdout and stderr; None =
    inherited.

    Blocks for the milliseconds of fork and exec. Raises `NotFound` if the program does not exist.
    """
    if shutil.which(command[0], path=(env or os.environ).get("PATH")) is None:
        raise NotFound(f"cannot start {name}: there is no program {command[0]!r}")
    process = subprocess.Popen(
        tied(command),
        env=None if env is None else dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        pass_fds=pass_fds,
        process_group=0,  # Ctrl-C in a terminal reaches only this process, which ends its children in order
    )
    return Child(name, process)


@asynccontextmanager
async def running(child: Child, *, stop_grace_s: float = STOP_GRACE_S) -> AsyncIterator[Child]:
    """Stop the child at the end of the block, also after an exception."""
    try:
        yield child
    finally:
        with anyio.CancelScope(shield=True):
            await child.stop(stop_grace_s)
