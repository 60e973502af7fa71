"""The worker template: a process that has done the imports once, from which the agent's workers are forked.

    python -m holdfast.train.warm.template        (started by an agent; `holdfast.domain.template` defines the messages)

A new worker would spend one to two seconds importing torch and as much again on modules that torch imports at first use; a
fork takes milliseconds. Forking is safe only while the parent has **one thread** (a lock held by another thread at the fork
would stay locked in the child) and has **used no device** (a CUDA context does not survive a fork). Both are checked after
every import, so that the responsible module can be named; otherwise the template refuses to serve.

Prepare functions (`holdfast.train.warm.preparation`) are called after all imports, and checked in the same way.

NumPy's OpenBLAS starts its thread pool when it is imported, so the agent's `IMPORT_ENVIRONMENT` gives it a pool of one, and
workers keep that. It keeps pyarrow's allocator from starting a thread, too. torch's own pool starts at first use, and each
worker sizes it by its `OMP_NUM_THREADS` (`holdfast.train.warm.forked`)."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from holdfast.domain import template as protocol
from holdfast.runtime.processes.huge_pages import use_huge_pages
from holdfast.train.observing import imports
from holdfast.train.warm import preparation
from holdfast.train.warm.entry import Entry
from holdfast.train.warm.forked import Launch, run_script
from holdfast.train.warm.reaper import fork_worker
from holdfast.train.warm.scout import IMPORT_FAILS, import_all
from holdfast.train.warm.side_effects import children
from holdfast.train.warm.sources import Sources

# Modules that most training scripts import. Half of the time is `_dynamo`, which the first optimizer imports.
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

FORK_DESCRIPTORS: Final = 4  # link, control, stdout, stderr


class CannotServe(Exception):
    """The template cannot fork workers; the message is sent to the agent."""


def main() -> None:
    channel = socket.socket(fileno=int(os.environ[protocol.ENV_SOCKET_FD]))
    channel.set_inheritable(False)
    began, began_at, before = time.monotonic(), time.time(), dict(os.environ)
    gc.disable()  # collections take a fifth of the import time, and modules are not garbage
    try:
        left_out = prepare(
            preload=json.loads(os.environ.get(protocol.ENV_PRELOAD, "[]")),
            path=json.loads(os.environ.get(protocol.ENV_PATH, "[]")),
            scout=os.environ.get(protocol.ENV_SCOUT, "") == "1",
            **_learned(),
        )
        gc.enable()  # what a prepare function leaves may be garbage
        left_out |= call_functions(
            json.loads(os.environ.get(protocol.ENV_PRELOAD, "[]")),
            json.loads(os.environ.get(protocol.ENV_UNPREPARED, "{}")),
            left_out,
            lambda reason: _send_failed(channel, reason),
        )
    except Spoiled as error:
        _end_children()
        channel.set_inheritable(True)
        again = [sys.executable, "-m", "holdfast.train.warm.template"]
        os.execve(sys.executable, again, {**before, **error.remedy})
    except CannotServe as error:
        _send_failed(channel, str(error))
        sys.exit(1)
    gc.collect()
    gc.freeze()  # a collection in a child then does not write to shared pages
    gc.enable()
    use_huge_pages()
    if number := os.environ.get(protocol.ENV_LEARNED_FD, ""):
        os.close(int(number))
    serving = Template(channel, Sources(began_at), before)
    channel.send(protocol.encode("ready", pid=os.getpid(), import_s=time.monotonic() - began, left_out=left_out))
    launch = serving.serve()
    if launch is not None:  # this is the child
        run_script(launch)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # exit handlers of modules belong to the workers, which may use what these handlers delete


def _learned() -> dict[str, Any]:
    """Return the modules that earlier workers have imported, and the variables that these must not read, from the agent's
    memory file."""
    if not (number := os.environ.get(protocol.ENV_LEARNED_FD, "")):
        return {}
    size = os.fstat(int(number)).st_size
    found = json.loads(os.pread(int(number), size, 0))
    return {"learned": found["modules"], "variables": found["variables"]}


def _send_failed(channel: socket.socket, reason: str) -> None:
    channel.send(protocol.encode("failed", reason=reason))


class Spoiled(CannotServe):
    """A module or a prepare function of the job has started a thread or opened a device. The next template process omits it:
    it tries modules in a fork first, and does not call the function. `remedy`: environment variables that request this."""

    def __init__(self, reason: str, remedy: Mapping[str, str] | None = None) -> None:
        super().__init__(reason)
        self.remedy = {protocol.ENV_SCOUT: "1"} if remedy is None else dict(remedy)


def prepare(
    preload: list[str],
    path: list[str],
    learned: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    *,
    scout: bool = False,
) -> dict[str, str]:
    """Import all modules. Returns those of the job that are left out, with the reason.

    Raises `CannotServe` that names a module that failed, started a thread or opened a device; `Spoiled` if leaving it out
    would help. `learned`: modules that an earlier worker has imported; they are always tried in a fork first
    (`holdfast.train.warm.scout`), those of `preload` with `scout`. For a prepare function in `preload`, its module
    is imported. `variables`: what learned modules must not read at import, because the script sets it (`SideEffects`)."""
    preload = list(dict.fromkeys(preparation.module_of(name) for name in preload))
    if not sys.flags.safe_path:
        sys.path.pop(0)  # `-m` inserted the agent's working directory; a script has its own directory there
    sys.path[:0] = path
    optional = [name for name in OPTIONAL_MODULES if importlib.util.find_spec(name) is not None]
    for name in (*MODULES, *optional):
        _import(name, CannotServe)
    imports.set_base(sys.modules)
    for name in () if scout else preload:
        _import(name, Spoiled)
    tried = [*(preload if scout else ()), *(name for name in learned if name not in sys.modules)]
    try:
        left_out = import_all(tried, spoiled_by, asked_for=frozenset(preload), variables=variables)
    except Exception as error:  # a module that behaves otherwise here than in the scout
        raise CannotServe(f"importing modules of earlier workers failed: {type(error).__name__}: {error}") from error
    for name in preload:  # what does not fail because of the template fails in the script as well
        if left_out.get(name, "").startswith(IMPORT_FAILS):
            raise CannotServe(f"importing {name} failed: {left_out[name].removeprefix(IMPORT_FAILS)}")
    return left_out


def call_functions(
    preload: Sequence[str],
    unprepared: Mapping[str, str],
    left_out: Mapping[str, str],
    on_timeout: Callable[[str], None],
) -> dict[str, str]:
    """Call the prepare functions of `preload`. Returns those that are left out, with the reason: their module is, or an earlier
    process found that they spoil the template (`unprepared`).

    Raises `CannotServe` that names a function that failed, `Spoiled` if one has spoiled this process."""
    skipped: dict[str, str] = {}
    for name in filter(preparation.is_function, preload):
        reason = unprepared.get(name, "") or left_out.get(preparation.module_of(name), "")
        if reason:
            skipped[name] = reason
            continue
        try:
            preparation.call(name, on_timeout)
        except preparation.PrepareFailed as error:
            raise CannotServe(f"preparing workers failed: {error}") from error
        if reason := spoiled_by(name) or _left_running(name):
            remedy = {protocol.ENV_UNPREPARED: json.dumps({**unprepared, name: reason})}
            raise Spoiled(f"preparing workers: {reason}; such a process cannot be forked safely", remedy)
    return skipped


def _left_running(name: str) -> str:
    """Describe the processes that the function has left running; empty = none. No reaper would end them."""
    pids = children()
    return f"{name} left {len(pids)} process(es) running: {', '.join(map(str, pids))}" if pids else ""


def _end_children() -> None:
    for pid in children():
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _import(name: str, spoiled: type[CannotServe]) -> None:
    """Raises `CannotServe` when it fails, `spoiled` when this process cannot be forked afterwards."""
    try:
        importlib.import_module(name)
    except Exception as error:
        raise CannotServe(f"importing {name} failed: {type(error).__name__}: {error}") from error
    if reason := spoiled_by(name):
        raise spoiled(f"importing {reason}; such a process cannot be forked safely")


def spoiled_by(name: str) -> str:
    """Describe why the process cannot serve as a template after the import of this module; empty = it can."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:
        return f"{name} started {threads - 1} thread(s): {', '.join(_thread_names())}"
    if devices := _open_devices():
        return f"{name} opened {', '.join(devices)}, and a GPU context does not survive a fork"
    return ""


def _thread_names() -> list[str]:
    names = []
    for task in os.listdir("/proc/self/task"):
        if int(task) != os.getpid():
            with open(f"/proc/self/task/{task}/comm") as comm:
                names.append(comm.read().strip())
    return names


def _open_devices() -> list[str]:
    """Return the GPU device files that this process has open."""
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
    """Forks workers on request, in one thread. The processes are children of the agent (`holdfast.train.warm.reaper`)."""

    def __init__(self, channel: socket.socket, sources: Sources, before: Mapping[str, str]) -> None:
        """`before`: the environment before the imports."""
        self._channel, self._sources, self._before = channel, sources, before
        names = (name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name))
        self._changed = {name: os.environ.get(name) for name in names}  # None = removed
        self._agent = os.getppid()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # direct children exit immediately and are not waited for

    def serve(self) -> Launch | None:
        """Serve until the agent sends drain or exits, then return None. In a forked worker, return its launch."""
        while True:
            raw, fds, _, _ = socket.recv_fds(
                self._channel, protocol.MESSAGE_BYTES_MAX, FORK_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
            )
            message = protocol.decode(raw) if raw else {"type": "drain"}
            if message["type"] == "drain":
                return None
            if message["type"] == "check":
                self._channel.send(protocol.encode("checked", changed=self._sources.changed()))
            if message["type"] == "fork" and (launch := self._fork(message, fds)) is not None:
                return launch

    def _fork(self, message: Mapping[str, Any], fds: list[int]) -> Launch | None:
        """Fork a worker. Returns its `Launch` in the worker, None in the template."""
        sys.stdout.flush()
        sys.stderr.flush()
        link = socket.socket(fileno=fds[0])
        try:
            pid = os.fork()
        except OSError as error:
            link.send(protocol.encode("fork_failed", reason=str(error)))
            pid = -1
        if pid == 0:
            self._channel.close()
            control, stdout, stderr = fds[1:]
            fork_worker(link, self._agent, (control, stdout, stderr))
            return Launch(
                entry=Entry(message["runs"], message["target"], tuple(message["args"]), message["cwd"]),
                env=self._environment(message["env"]),
                control=control,
                stdout=stdout,
                stderr=stderr,
            )
        link.close()
        _close(fds[1:])
        return None

    def _environment(self, of_worker: Mapping[str, str]) -> dict[str, str]:
        """Add what the imports have set, where the worker has the value that they have found: there they would do the same."""
        environment = dict(of_worker)
        for name, value in self._changed.items():
            if environment.get(name) == self._before.get(name):
                if value is None:
                    environment.pop(name, None)
                else:
                    environment[name] = value
        return environment


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


if __name__ == "__main__":
    main()
