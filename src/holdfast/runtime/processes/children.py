"""Child processes that cannot outlive this process.

Three mechanisms, because each alone is incomplete: `PR_SET_PDEATHSIG` kills the child when this process exits for any reason;
its own process group allows killing it with everything that it started; a pidfd reports its exit at once and never refers to
another process.

Two pitfalls. The kernel ties `PR_SET_PDEATHSIG` to the *thread* that forked, not to the process: a child started from a worker
thread would be killed when that thread ends, so only the main thread may start one. And `subprocess`'s `preexec_fn` runs the
at-fork handlers of gRPC, which abort the child when its threads are busy (seen: SIGABRT). So a few lines of Python between
this process and the program set the tie and then exec the program.

A child of another user (`user`) gets its environment through a file, and that user's uid in these lines. What the environment
says to the interpreter or to the loader (PYTHONPATH, LD_PRELOAD) takes effect only in the program, which has the uid by then
and cannot get another (PR_SET_NO_NEW_PRIVS). `subprocess` could change the uid as well, but would then fork with the at-fork
handlers."""

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
from holdfast.runtime.processes.training_user import TrainingUser

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

# argv: this process's pid, the descriptor of the environment, uid, gid, groups, umask, the program, its arguments. 38 is
# PR_SET_NO_NEW_PRIVS. A change of the uid clears the tie, so the tie comes after it. Memory that root may lock (RDMA) remains
# lockable.
_BECOME = """\
import ctypes, os, resource, sys
parent, environment, uid, gid = map(int, sys.argv[1:5])
with open(environment, "rb") as file:
    variables = dict(each.split(b"=", 1) for each in file.read().split(b"\\0") if each)
try:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
except (OSError, ValueError):
    pass
try:
    os.setgroups([int(each) for each in sys.argv[5].split(",")])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
except OSError as error:
    sys.exit(f"cannot become user {uid}: {error.strerror}")
os.umask(int(sys.argv[6]))
prctl = ctypes.CDLL(None).prctl
if prctl(38, 1, 0, 0, 0) or prctl(1, 9, 0, 0, 0):
    sys.exit("prctl(PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG) failed")
if os.getppid() != parent:
    os._exit(137)
try:
    os.execvpe(sys.argv[7], sys.argv[7:], variables)
except OSError as error:
    sys.exit(f"user {uid} cannot execute {sys.argv[7]}: {error.strerror}")
"""
# Of this process's own environment, what the interpreter may need to start.
_LOADER = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")


def tied(command: Sequence[str], *, thread_lasts: bool = False) -> list[str]:
    """Return the command line that runs `command` so that it gets SIGKILL when this process exits. Start it from the
    main thread.

    `thread_lasts`: the caller guarantees that the present thread outlives the child.
    """
    if not thread_lasts:
        _require_main_thread()
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]


def _require_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "PR_SET_PDEATHSIG follows the thread that forks: a child started from this thread would be killed when the "
            "thread ends; start it from the main thread"
        )


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
    user: TrainingUser | None = None,
) -> Child:
    """Start `command` in its own process group, tied to this process. `output` receives its stdout and stderr; None =
    inherited. `user`: the user that it runs as, without the privileges of this process; None = that of this process.

    Blocks for the milliseconds of fork and exec. Raises `NotFound` if the program does not exist.
    """
    if shutil.which(command[0], path=(env or os.environ).get("PATH")) is None:
        raise NotFound(f"cannot start {name}: there is no program {command[0]!r}")
    if user is None:
        return Child(name, _start(tied(command), env, cwd, output, pass_fds))
    variables = _memory_file(env if env is not None else os.environ)
    try:
        become = _becoming(user, variables, command)
        own = {each: os.environ[each] for each in _LOADER if each in os.environ}
        return Child(name, _start(become, own, cwd, output, (*pass_fds, variables)))
    finally:
        os.close(variables)


def _start(
    command: Sequence[str],
    env: Mapping[str, str] | None,
    cwd: Path | None,
    output: IO[bytes] | int | None,
    pass_fds: Sequence[int],
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=None if env is None else dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        pass_fds=pass_fds,
        process_group=0,  # Ctrl-C in a terminal reaches only this process, which ends its children in order
    )


def _becoming(user: TrainingUser, environment: int, command: Sequence[str]) -> list[str]:
    _require_main_thread()
    groups = ",".join(map(str, user.groups))
    numbers = map(str, (os.getpid(), environment, user.uid, user.gid))
    return [sys.executable, "-I", "-S", "-c", _BECOME, *numbers, groups, str(user.umask), *command]


def _memory_file(environment: Mapping[str, str]) -> int:
    """Return a descriptor of a file in memory with the environment."""
    file = os.memfd_create("environment", os.MFD_CLOEXEC)
    left = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    while left:
        left = left[os.write(file, left) :]
    os.lseek(file, 0, os.SEEK_SET)
    return file


@asynccontextmanager
async def running(child: Child, *, stop_grace_s: float = STOP_GRACE_S) -> AsyncIterator[Child]:
    """Stop the child at the end of the block, also after an exception."""
    try:
        yield child
    finally:
        with anyio.CancelScope(shield=True):
            await child.stop(stop_grace_s)
