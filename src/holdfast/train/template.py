"""The worker template: a process that has paid for the imports once, from which the agent's workers are forked.

    python -m holdfast.train.template        (started by an agent; see `holdfast.domain.template` for what they say)

A fresh worker spends one to two seconds importing torch and as much again on modules that torch imports at first use; a
fork costs milliseconds. Forking is only sound while the parent has **one thread** (a lock held by another thread at the
fork would stay locked in the child for ever) and has **touched no device** (a CUDA context does not survive a fork). Both
are checked after every single import, so that the module to blame is named, and the template refuses to serve otherwise.

NumPy's OpenBLAS starts its pool of threads when it is imported, so the agent's `IMPORT_ENVIRONMENT` gives it a pool of one, and
workers keep that; torch's own pool starts at first use, and each worker sizes it by its `OMP_NUM_THREADS`
(`holdfast.train.forked`).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.domain import template as protocol
from holdfast.train.forked import Launch, run_script

# What a training script imports sooner or later; `_dynamo` alone is half of it, paid by the first optimizer.
MODULES: Final = (
    "torch",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    "torch._dynamo",
    "holdfast.train",
)
OPTIONAL_MODULES: Final = ("numpy",)

FORK_DESCRIPTORS: Final = 3  # control, stdout, stderr
PR_SET_PDEATHSIG: Final = 1

_libc = ctypes.CDLL(None, use_errno=True)


class CannotServe(Exception):
    """Why workers cannot be forked from here; the message goes to the agent."""


@dataclass(slots=True)
class _Child:
    pid: int
    pidfd: int


def main() -> None:
    channel = socket.socket(fileno=int(os.environ[protocol.ENV_SOCKET_FD]))
    channel.set_inheritable(False)
    began = time.monotonic()
    try:
        prepare(
            preload=json.loads(os.environ.get(protocol.ENV_PRELOAD, "[]")),
            path=json.loads(os.environ.get(protocol.ENV_PATH, "[]")),
        )
    except CannotServe as error:
        channel.send(protocol.encode("failed", reason=str(error)))
        sys.exit(1)
    gc.collect()
    gc.freeze()  # no collection in a child ever writes to the pages that all of them share
    channel.send(protocol.encode("ready", pid=os.getpid(), import_s=time.monotonic() - began))
    launch = Template(channel).serve()
    if launch is not None:  # this is the child
        run_script(launch)


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when the thread that forked it ends; ends it now when that has already happened."""
    if _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)


def prepare(preload: list[str], path: list[str]) -> None:
    """Import everything. Raises `CannotServe` naming the module that failed, started a thread or opened a device."""
    if not sys.flags.safe_path:
        sys.path.pop(0)  # `-m` put the agent's working directory there; a script would find its own directory instead
    sys.path[:0] = path
    optional = [name for name in OPTIONAL_MODULES if importlib.util.find_spec(name) is not None]
    for name in (*MODULES, *optional, *preload):
        try:
            importlib.import_module(name)
        except Exception as error:
            raise CannotServe(f"importing {name} failed: {type(error).__name__}: {error}") from error
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            raise CannotServe(
                f"importing {name} started {threads - 1} thread(s): {', '.join(_thread_names())}; "
                "a process with threads cannot be forked safely. Take the module out of `preload`"
            )
        if devices := _open_devices():
            raise CannotServe(
                f"importing {name} opened {', '.join(devices)}; a GPU context does not survive a fork. "
                "Take the module out of `preload`"
            )


def _thread_names() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        if int(task) != os.getpid():
            with open(f"/proc/self/task/{task}/comm") as comm:
                names.append(comm.read().strip())
    return names


def _open_devices() -> list[str]:
    """GPU device files that this process holds open."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if target.startswith(("/dev/nvidia", "/dev/dri", "/dev/kfd")):
            found.add(target)
    return sorted(found)


class Template:
    """Forks on request and reaps. One thread, one loop; everything it knows is its living children."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._children: dict[int, _Child] = {}  # by pidfd
        self._draining = False

    def serve(self) -> Launch | None:
        """Until told to drain and the last child is gone, or the agent is: None. In a forked child: what to run."""
        with selectors.PollSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            while not (self._draining and not self._children):
                for key, _ in selector.select():
                    if key.fileobj is not self._channel:
                        selector.unregister(key.fd)
                        self._reap(self._children.pop(key.fd))
                        continue
                    raw, fds, _, _ = socket.recv_fds(
                        self._channel, protocol.MESSAGE_BYTES_MAX, FORK_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                    )
                    if not raw:
                        return None  # the agent is gone; the children go with this process (PR_SET_PDEATHSIG)
                    message = protocol.decode(raw)
                    if message["type"] == "drain":
                        self._draining = True
                    elif message["type"] == "fork":
                        forked = self._fork(message, fds)
                        if isinstance(forked, Launch):
                            return forked
                        if forked is not None:
                            selector.register(forked.pidfd, selectors.EVENT_READ)
        return None

    def _fork(self, message: Mapping[str, Any], fds: list[int]) -> Launch | _Child | None:
        """The child's `Launch` in the child, the child in the parent, None when there was no process to be had."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            _close(fds)
            self._channel.send(protocol.encode("fork_failed", id=message["id"], reason=f"fork: {error}"))
            return None
        if pid == 0:
            die_with_parent(parent)
            self._channel.close()
            _close([child.pidfd for child in self._children.values()])
            control, stdout, stderr = fds
            return Launch(
                script=message["script"],
                args=tuple(message["args"]),
                cwd=message["cwd"],
                env=message["env"],
                control=control,
                stdout=stdout,
                stderr=stderr,
            )
        _close(fds)
        child = _Child(pid, os.pidfd_open(pid))  # before anyone reaps it: the pid cannot have been used again
        self._children[child.pidfd] = child
        socket.send_fds(self._channel, [protocol.encode("forked", id=message["id"], pid=pid)], [child.pidfd])
        return child

    def _reap(self, child: _Child) -> None:
        """Say how it ended. While it is a zombie its pid names its process group and nobody else's: kill what is left there."""
        ended = os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOWAIT)
        at = time.time()
        assert ended is not None  # only WNOHANG returns None
        try:
            os.killpg(child.pid, signal.SIGKILL)  # data-loader processes and whatever else it started
        except ProcessLookupError:
            pass  # it died before it made its own group
        os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED)
        os.close(child.pidfd)
        by_exit = ended.si_code == os.CLD_EXITED
        self._channel.send(
            protocol.encode(
                "exited",
                pid=child.pid,
                exit_code=ended.si_status if by_exit else None,
                signal=None if by_exit else ended.si_status,
                at=at,
            )
        )


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


if __name__ == "__main__":
    main()
