"""A local stack whose services and nodes are forks of a process that has imported what they import.

A stack of two nodes costs ten seconds of CPU time less: each node imports the agent, the replicator and torch, and each
service its own modules. What runs is the same, and so is the tree of processes: an agent's helper, forked before the agent
itself runs, forks the replicator and the worker templates, and leaves them to the agent.

                                                       ┌── helper ── (forks twice, so that the agent becomes the parent)
    test ── process that has imported everything ── agent ── replicator
                  │                                    └── template ── …
                  └── diagnostics, supervisor

Only /proc/PID/environ differs: it remains that of the first process. What changes how modules are imported (PYTHONPATH, a
preloaded module) gets a new process as ever. `python -m` and the commands of users are what `Shell` starts.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from holdfast.cli.processes import Process

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
REQUEST_BYTES_MAX = 180_000
DESCRIPTORS_MAX = 8
FREE_FROM = 1000  # above every descriptor that a child is promised
SERVICES = ("holdfast.agent", "holdfast.replicator", "holdfast.diagnostics", "holdfast.supervisor")
TEMPLATE = "holdfast.train.template"
OF_AN_AGENT = ("holdfast.replicator", TEMPLATE)
IMPORTED_BY_TEMPLATES = ("HOLDFAST_TEMPLATE_PRELOAD", "HOLDFAST_TEMPLATE_PATH", "HOLDFAST_TEMPLATE_LEARNED")

_libc = ctypes.CDLL(None, use_errno=True)


def at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """What of it takes effect at import."""
    # Not at the top: the process that forks must not have the agent before it knows what a template imports.
    from holdfast.agent.workers.template import IMPORT_TIME_NAMES, IMPORT_TIME_PREFIXES

    return {
        name: value
        for name, value in environment.items()
        if name in IMPORT_TIME_NAMES or name.startswith(IMPORT_TIME_PREFIXES)
    }


def imported(environment: Mapping[str, str], before: Mapping[str, str]) -> bool:
    """Whether a process with this environment would have imported what one with the environment `before` has."""
    more = [name for name in IMPORTED_BY_TEMPLATES if environment.get(name, "[]") != "[]"]
    return not more and at_import(environment) == at_import(before)


# ---------------------------------------------------------------- in the test


def warm_or_new(module: str, environment: Mapping[str, str], directory: Path, output: IO[bytes]) -> Process | None:
    """A running `python -m module`; None if only a new process can have this environment."""
    from warm_processes import STACK, warm

    if not imported(environment, os.environ):
        return None
    started = warm(STACK).start([module], directory, environment, output.fileno(), output.fileno())
    return cast("Process", started)


# ---------------------------------------------------------------- in the process that forks


class Imports:
    """Imports everything, and remembers what a template imports."""

    def __init__(self) -> None:
        from holdfast.train import template

        self.environment = dict(os.environ)
        template.prepare(preload=[], path=[])
        self._of_templates = frozenset(sys.modules) - {TEMPLATE}
        self._forgotten: list[Any] = []
        for service in SERVICES:
            importlib.import_module(f"{service}.service")

    def run(self, module: str) -> None:
        """As `python -m` does it, in a fork."""
        _entitle("python", "-m", module)
        if module == TEMPLATE:
            self._forget_services()
            sys.path.insert(0, os.getcwd())  # which the template drops
        if module == "holdfast.agent":
            self._start_helper()
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    def _forget_services(self) -> None:
        """A worker imports what its template has not: not everything that this process has."""
        for name in set(sys.modules) - self._of_templates - {"__main__"}:
            self._forgotten.append(sys.modules.pop(name))

    def _start_helper(self) -> None:
        """Fork the helper of this process, the agent, and have it start what it can."""
        from holdfast.runtime import children

        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        agent, (ours, theirs) = os.getpid(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            module = _help(theirs, agent)
            theirs.close()
            self.run(module)
            sys.exit()
        theirs.close()
        new = children._start

        def start(
            command: Sequence[str],
            env: Mapping[str, str] | None,
            cwd: Path | None,
            output: IO[bytes] | int | None,
            pass_fds: Sequence[int],
        ) -> Any:
            environment, module = os.environ if env is None else env, command[-1]
            warm = tuple(command[-3:-1]) == (sys.executable, "-m") and module in OF_AN_AGENT and isinstance(output, int)
            if not warm or not imported(environment, self.environment):
                return new(command, env, cwd, output, pass_fds)
            assert isinstance(output, int)
            return _Forked(ours, module, environment, cwd, output, pass_fds)

        children._start = start


class _Forked:
    """A child of the agent: as much of `subprocess.Popen` as `holdfast.runtime.children` needs."""

    def __init__(
        self,
        helper: socket.socket,
        module: str,
        environment: Mapping[str, str],
        cwd: Path | None,
        output: int,
        pass_fds: Sequence[int],
    ) -> None:
        request = {
            "module": module,
            "environment": dict(environment),
            "directory": str(cwd or Path.cwd()),
            "descriptors": list(pass_fds),
        }
        socket.send_fds(helper, [json.dumps(request).encode()], [output, *pass_fds])
        self.pid = int(helper.recv(64) or 0)
        if not self.pid:
            raise OSError("the helper of this agent has ended")
        self.returncode: int | None = None

    def wait(self) -> int:
        if self.returncode is None:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


# ---------------------------------------------------------------- in the helper of an agent


def _help(requests: socket.socket, agent: int) -> str:
    """Serve the agent until it ends. Returns in a child, the module that it is to run."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _entitle("a helper of tests")
    while True:
        raw, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, DESCRIPTORS_MAX)
        if not raw:
            os._exit(0)
        answer, theirs = os.pipe()
        between = os.fork()
        if between == 0:
            if child := os.fork():
                os.write(theirs, str(child).encode())
                os._exit(0)
            os.close(answer)
            os.close(theirs)
            request = json.loads(raw)
            _become(request, descriptors, agent)
            return str(request["module"])
        os.close(theirs)
        os.waitpid(between, 0)
        with os.fdopen(answer, "rb") as pipe:
            pid = pipe.read()
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(pid)


def _become(request: Mapping[str, Any], descriptors: Sequence[int], agent: int) -> None:
    """The process that `holdfast.runtime.children.spawn` would have started."""
    import fcntl

    os.setpgid(0, 0)
    _until_child_of(agent)
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FREE_FROM) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    output, *passed = moved
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    for standard in (1, 2):
        os.dup2(output, standard)
    for descriptor, number in zip(passed, request["descriptors"], strict=True):
        os.dup2(descriptor, number)
    for descriptor in moved:
        os.close(descriptor)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["module"]]


def _until_child_of(agent: int) -> None:
    """The one that has forked this process ends now; then the agent is its parent, and its end the end of this process."""
    while (parent := os.getppid()) != agent:
        try:
            ended = os.pidfd_open(parent)
        except ProcessLookupError:
            continue
        if os.getppid() == parent:
            select.select([ended], [], [])
        os.close(ended)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != agent:
        os._exit(1)


def _entitle(*words: str) -> None:
    """What `ps` shows as the command line, and by what tests find this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    title = "\0".join(words).encode()[: end - start - 1]
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(title.ljust(end - start, b"\0"))


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
