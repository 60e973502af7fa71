"""Stacks, agents, torchrun and commands that start a stack, as forks of a process that has imported what they import.

A stack of two nodes costs ten seconds of CPU time less: each node imports the agent, the replicator and torch, and each
service its own modules. What runs is the same, and so is the tree of processes: an agent's helper, forked before the agent
itself runs, forks the replicator and the worker templates, and leaves them to the agent. A command has such a helper for
its services and agents.

                                                       ┌── helper ── (forks twice, so that the agent becomes the parent)
    test ── process that has imported everything ── agent ── replicator
                  │                                    └── template ── …
                  ├── torchrun ── helper ── (forks twice, so that torchrun becomes the parent)
                  │       └── ranks
                  ├── diagnostics, supervisor
                  └── `holdfast up`, `holdfast run --local` ── helper
                                          └── diagnostics, supervisor, agents

What changes how modules are imported (PYTHONPATH) gets another process to fork from. Some tests start
`python -m holdfast.cli.main` itself: `Shell.start_python`, and those of acceptance.
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
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from warm_processes import UNBUFFERED, WarmProcess, be_script, show_environment, write_at_once

if TYPE_CHECKING:
    from holdfast.cli.processes import Process
    from holdfast.cli.stack import LocalStack

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37
REQUEST_BYTES_MAX = 180_000
DESCRIPTORS_MAX = 8
FREE_FROM = 1000  # above every descriptor that a child is promised
SERVICES = ("holdfast.agent", "holdfast.replicator", "holdfast.diagnostics", "holdfast.supervisor")
COMMAND = "holdfast.cli.main"
TEMPLATE = "holdfast.train.warm.template"
CACHE = "TORCHINDUCTOR_CACHE_DIR"
TORCHRUN = "torch.distributed.run"
SCRIPT = "script"  # in place of a module: the arguments are -u, or not, the path of a training script, and its own
OF_AN_AGENT = ("holdfast.replicator", TEMPLATE)

_libc = ctypes.CDLL(None, use_errno=True)


def at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """What of it takes effect at import. PYTHONUNBUFFERED takes effect in forks, too (`warm_processes`)."""
    # torch writes its default into the environment when a test uses an optimizer: the next stack is as warm as before.
    # Not at the top: the process that forks must not have the agent before it knows what a template imports.
    from holdfast.agent.workers.template import IMPORT_TIME_NAMES, IMPORT_TIME_PREFIXES

    return {
        name: value
        for name, value in environment.items()
        if (name in IMPORT_TIME_NAMES or name.startswith(IMPORT_TIME_PREFIXES))
        and name != UNBUFFERED
        and not (name == CACHE and Path(value).name.startswith("torchinductor_"))
    }


def imported(environment: Mapping[str, str], before: Mapping[str, str]) -> bool:
    """Whether a process with this environment would have imported what one with the environment `before` has.

    What a template imports beside that, modules of a job, it imports itself."""
    return at_import(environment) == at_import(before)


# ---------------------------------------------------------------- in the test


def warm_or_new(module: str, environment: Mapping[str, str], directory: Path, output: IO[bytes]) -> Process | None:
    """A running `python -m module`; None if only a new process can have this environment."""
    from warm_processes import STACK, warm

    wanted, ours = at_import(environment), at_import(os.environ)
    if ours.keys() - wanted.keys():
        return None
    differing = {name: value for name, value in wanted.items() if ours.get(name) != value}
    started = warm(STACK, **differing).start([module], directory, environment, output.fileno(), output.fileno())
    return cast("Process", started)


# ---------------------------------------------------------------- in the process that forks


class Imports:
    """Imports everything, and remembers what a template imports."""

    def __init__(self) -> None:
        from holdfast.train.warm import template

        self.environment = dict(os.environ)
        template.prepare(preload=[], path=[])
        self._of_templates = frozenset(sys.modules) - {TEMPLATE}
        self._forgotten: list[Any] = []
        for service in SERVICES:
            importlib.import_module(f"{service}.service")
        for lazy in ("anyio._backends._asyncio", "uvicorn.protocols.http.h11_impl"):
            importlib.import_module(lazy)
        self._prepare_records()
        from holdfast.cli import main

        main.application()  # with every subcommand

    def _prepare_records(self) -> None:
        """Compile what a supervisor compiles at its start: half of the CPU time that this takes."""
        from holdfast.supervisor.inbox import InboxEvent
        from holdfast.supervisor.leader import snapshot
        from holdfast.supervisor.published import Published
        from holdfast.wire import records

        snapshot.prepare()
        records.prepare(Published, InboxEvent)

    def run(self, module: str, *arguments: str) -> None:
        """As `python -m` does it, in a fork."""
        _entitle("python", *(arguments if module == SCRIPT else ("-m", module, *arguments)))
        if module in (TEMPLATE, TORCHRUN, SCRIPT):
            self._forget_services()
        if module == TORCHRUN:
            self._ranks_are_forks()
        if module == SCRIPT:
            if arguments[0] == "-u":
                write_at_once()
            be_script(arguments[arguments[0] == "-u" :])
            return
        if module == TEMPLATE:
            sys.path.insert(0, os.getcwd())  # which the template drops
        if module == "holdfast.agent":
            self._children_are_forks()
        if module == COMMAND:
            self._stacks_are_forks()
            from holdfast.cli import main

            sys.argv = ["holdfast", *arguments]
            main.main()
            return
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    def _forget_services(self) -> None:
        """A worker imports what its template has not: not everything that this process has."""
        for name in set(sys.modules) - self._of_templates - {"__main__"}:
            self._forgotten.append(sys.modules.pop(name))

    def _helper(self) -> _Helper:
        """Fork the helper of this process. Returns here only: a child of the helper runs its module and ends."""
        parent, (ours, theirs) = os.getpid(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ours.close()
            wanted = _help(theirs, parent)
            theirs.close()
            self.run(*wanted)
            sys.exit()
        theirs.close()
        return _Helper(ours)

    def _children_are_forks(self) -> None:
        """This process, an agent, gets its children from a helper, where that makes no difference."""
        from holdfast.runtime.processes import children

        helper, new = self._helper(), children._start

        def start(
            command: Sequence[str],
            env: Mapping[str, str] | None,
            cwd: Path | None,
            output: IO[bytes] | int | None,
            pass_fds: Sequence[int],
        ) -> Any:
            environment, module, user = os.environ if env is None else env, command[-1], list[str]()
            if children._BECOME in command:
                user = [*command[command.index(children._BECOME) : -3]]
                environment = _environment_of(int(user[2]))
            warm = tuple(command[-3:-1]) == (sys.executable, "-m") and module in OF_AN_AGENT and isinstance(output, int)
            if not warm or not imported(environment, self.environment):
                return new(command, env, cwd, output, pass_fds)
            assert isinstance(output, int)
            return helper.start(module, environment, cwd or Path.cwd(), output, pass_fds, user=user)

        children._start = start

    def _ranks_are_forks(self) -> None:
        """This process, torchrun, gets the ranks of a script from a helper, where that makes no difference."""
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        helper, new = self._helper(), SubprocessHandler._popen

        def popen(handler: SubprocessHandler, args: tuple[str, ...], env: dict[str, str]) -> Any:
            interpreter, *script = args
            of_python = (interpreter, *script[:1]) == (sys.executable, "-u") and script[1:2] != ["-m"]
            if not of_python or handler._stdout or handler._stderr or not imported(env, self.environment):
                return new(handler, args, env)
            return helper.start(SCRIPT, env, Path.cwd(), 1, (), arguments=script, own_session=True, outlives=True)

        SubprocessHandler._popen = popen  # type: ignore[method-assign, assignment]

    def _stacks_are_forks(self) -> None:
        """This process, a command, gets the processes of its stack from a helper, where that makes no difference."""
        from holdfast.cli.stack import LocalStack
        from holdfast.cli.stack_record import pid_file

        helper, new = self._helper(), LocalStack._run

        def run(
            stack: LocalStack, part: str, module: str, environment: Mapping[str, str], output: IO[bytes]
        ) -> Process:
            if not imported(environment, self.environment):
                return new(stack, part, module, environment, output)
            directory, lock, note = stack._directory.absolute(), tuple[int, ...](), ""
            if stack._options.stays and stack._memory is not None:
                lock, note = (stack._memory.lock,), str(pid_file(directory, part))
            started = helper.start(module, environment, directory, output.fileno(), lock, note=note, own_session=True)
            return cast("Process", started)

        LocalStack._run = run  # type: ignore[method-assign, assignment]


class _Helper:
    """The helper of this process."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._asking = threading.Lock()

    def start(
        self,
        module: str,
        environment: Mapping[str, str],
        directory: Path,
        output: int,
        pass_fds: Sequence[int],
        *,
        arguments: Sequence[str] = (),
        note: str = "",
        user: Sequence[str] = (),
        own_session: bool = False,
        outlives: bool = False,
    ) -> WarmProcess:
        """A child of this process. `outlives`: when this one is killed, it runs on. `note`: the pid file of one that is not
        this one's child by then, either. `user`: `holdfast.runtime.processes.children._BECOME` and its arguments."""
        request = {
            "module": module,
            "environment": dict(environment),
            "directory": str(directory),
            "descriptors": list(pass_fds),
            "arguments": list(arguments),
            "note": note,
            "user": list(user),
            "own_session": own_session,
            "outlives": outlives,
        }
        with self._asking, _adopting():
            socket.send_fds(self._requests, [json.dumps(request).encode()], [output, *pass_fds])
            pid = int(self._requests.recv(64) or 0)
        if not pid:
            raise OSError("the helper of this process has ended")
        return WarmProcess(pid, lambda pid: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


# ---------------------------------------------------------------- in the helper of an agent or a command


def _help(requests: socket.socket, parent: int) -> list[str]:
    """Serve the parent until it ends. Returns in a child, the module that it is to run, and its arguments."""
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
            _become(request, descriptors, parent)
            return [request["module"], *request["arguments"]]
        os.close(theirs)
        os.waitpid(between, 0)
        with os.fdopen(answer, "rb") as pipe:
            pid = pipe.read()
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(pid)


def _become(request: Mapping[str, Any], descriptors: Sequence[int], parent: int) -> None:
    """The process that `holdfast.runtime.processes.children.spawn` or `LocalStack` would have started."""
    import fcntl

    if request["own_session"]:
        os.setsid()
    else:
        os.setpgid(0, 0)
    if not request["note"]:
        _until_child_of(parent)
        _prctl(PR_SET_PDEATHSIG, 0 if request["outlives"] else signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
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
    show_environment(request["environment"])
    if request["environment"].get(UNBUFFERED):
        write_at_once()
    sys.argv = [request["module"]]
    if request["note"]:
        _note(request["note"])
    if request["user"]:
        _become_user(*request["user"])


def _note(pid_file: str) -> None:
    """The pid file that `holdfast.runtime.processes.survivors.noted` writes, by its own lines."""
    from holdfast.runtime.processes import survivors

    argv, sys.argv = sys.argv, ["-c", pid_file]
    exec(survivors._NOTE.rpartition("os.execvp")[0], {})
    sys.argv = argv


def _become_user(lines: str, *arguments: str) -> None:
    """The user that `holdfast.runtime.processes.children.spawn` would have given this process, by its own lines."""
    argv, sys.argv = sys.argv, ["-c", *arguments]
    exec(lines.rpartition("try:\n    os.execvpe")[0], {})
    sys.argv = argv
    _prctl(PR_SET_DUMPABLE, 1)  # as after an exec: /proc/PID of this process belongs to its user


def _environment_of(file: int) -> dict[str, str]:
    """The environment that `holdfast.runtime.processes.children.spawn` hands to a process of another user."""
    raw = os.pread(file, os.fstat(file).st_size, 0)
    return dict(os.fsdecode(each).split("=", 1) for each in raw.split(b"\0") if each)


def _until_child_of(wanted: int) -> None:
    """The process that has forked this one ends now; then `wanted` is its parent."""
    while (parent := os.getppid()) != wanted:
        try:
            ended = os.pidfd_open(parent)
        except ProcessLookupError:
            continue
        if os.getppid() == parent:
            select.select([ended], [], [])
        os.close(ended)


def _entitle(*words: str) -> None:
    """What `ps` shows as the command line, and by what tests find this process."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end of proc(5)
    title = "\0".join(words).encode()[: end - start - 1]
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(title.ljust(end - start, b"\0"))


@contextmanager
def _adopting() -> Iterator[None]:
    """Meanwhile this process is the parent of what its descendants leave behind; an agent always is."""
    before = ctypes.c_int()
    if _libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_GET_CHILD_SUBREAPER)")
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    yield
    _prctl(PR_SET_CHILD_SUBREAPER, before.value)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
