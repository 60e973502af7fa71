"""`holdfast` commands, services and training scripts in forks of a process that has imported what they import.

Half a second of CPU time is saved for a service, three for a script that uses torch.

`Warm` belongs to the tests; this file run as a script is the process that forks.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import hashlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from holdfast.runtime.processes.huge_pages import use_huge_pages

if TYPE_CHECKING:
    from io import TextIOWrapper

REQUEST_BYTES_MAX = 64 << 10
DESCRIPTORS_MAX = 4
DIRECTORY = "TEST_WARM_PROCESSES"  # variable: where the sockets of the processes that fork are
LISTENER = 3  # descriptor of such a process
PR_SET_PDEATHSIG = 1
# Room in the first environment of the process that forks, for what /proc/PID/environ is to show of its forks.
ROOM, ROOM_BYTES = "TEST_ROOM", 32 << 10
UNBUFFERED = "PYTHONUNBUFFERED"
TITLE_BYTES = 512  # room for what `ps` is to show of a fork
# What a process is warm for; else the name of a service's package, as after `python -m`, or for the script that is the first
# argument.
COMMANDS = "commands"
SCRIPTS = "scripts"  # the first argument is the script
STACK = (
    "stack"  # the first argument is the module: a service, an agent, torchrun, or `holdfast.cli.main` (`warm_stack`)
)


class WarmProcess:
    """A fork: as much of `subprocess.Popen` as tests need."""

    def __init__(self, pid: int, code_of: Callable[[int], int]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._code_of = code_of
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Seconds. Raises TimeoutExpired."""
        if (code := self._ended(timeout)) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def _ended(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            end = select.poll()
            end.register(self._pidfd, select.POLLIN)
            if end.poll(None if timeout_s is None else timeout_s * 1000):
                self.returncode = self._code_of(self.pid)
                os.close(self._pidfd)
        return self.returncode


class WarmCommand(subprocess.Popen[str]):
    """A fork that prints to pipes."""

    def __init__(self, process: WarmProcess, arguments: Sequence[str], stdout: int, stderr: int) -> None:
        """`stdout`, `stderr`: the ends of the pipes from which one reads."""
        self._process = process
        self.args = list(arguments)
        self.pid = process.pid
        self.returncode: int | None = None
        self.stdin = None
        self.stdout = open(stdout, encoding="utf-8", errors="strict")  # noqa: SIM115 - closed as those of every `Popen`
        self.stderr = open(stderr, encoding="utf-8", errors="strict")  # noqa: SIM115
        self.text_mode = True
        self._child_created = False  # of the process that forks: nothing that `__del__` must care for
        self._communication_started = False
        self._input = None

    def poll(self) -> int | None:
        self.returncode = self._process.poll()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.returncode = self._process.wait(timeout)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        self._process.send_signal(signal.Signals(sig))


class Warm:
    """A connection to a process that forks, which serves all test processes of a run, and ends with the last connection."""

    def __init__(self, what: str, view: Sequence[str], at_import: Mapping[str, str]) -> None:
        """`view`: the start of the command line, which gives it another view of the file system. `at_import`: variables that
        take effect at import, beside those of this process."""
        name = hashlib.sha256(json.dumps([what, view, sorted(at_import.items())]).encode()).hexdigest()[:16]
        path = os.path.join(_directory(), name)
        self._asking = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with _alone(path):
            try:
                self._socket.connect(path)
            except (FileNotFoundError, ConnectionRefusedError):  # none yet, or it was killed
                with suppress(FileNotFoundError):
                    os.unlink(path)
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                    listener.bind(path)
                    listener.listen()
                    _start([*view, sys.executable, __file__, what, path, "." * TITLE_BYTES], at_import, listener)
                self._socket.connect(path)

    def start(
        self,
        arguments: Sequence[str],
        directory: Path,
        environment: Mapping[str, str],
        out: int,
        err: int,
        **inherited: int,
    ) -> WarmProcess:
        """`out`, `err`: descriptors, copied. `inherited`: more of them, by the variable that tells their number there."""
        request = {
            "arguments": list(arguments),
            "directory": str(directory),
            "environment": dict(environment),
            "inherited": list(inherited),
        }
        pid = self._ask(request, out, err, *inherited.values())
        return WarmProcess(pid, lambda pid: self._ask({"wait": pid}))

    def command(self, arguments: Sequence[str], directory: Path, environment: Mapping[str, str]) -> WarmCommand:
        """What it prints is read from its pipes."""
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        try:
            process = self.start(arguments, directory, environment, out_end, err_end)
        finally:
            os.close(out_end)
            os.close(err_end)
        return WarmCommand(process, arguments, out, err)

    def __call__(
        self, arguments: Sequence[str], directory: Path, environment: Mapping[str, str], timeout_s: float
    ) -> tuple[int, str, str]:
        """Exit code, as subprocess has it, standard output, standard error. TimeoutExpired ends the command."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = self.start(arguments, directory, environment, out.fileno(), err.fileno())
            try:
                code = process.wait(timeout_s)
            finally:
                process.kill()
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read().decode())
        return code, said[0], said[1]

    def _ask(self, request: Mapping[str, Any], *descriptors: int) -> int:
        with self._asking:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            return int(self._socket.recv(64))

    def close(self) -> None:
        """What it has forked for this process and still runs is killed."""
        self._socket.close()


def share() -> str:
    """Makes the directory by which the test processes that this one starts find the processes that fork. Returns its path."""
    os.environ[DIRECTORY] = tempfile.mkdtemp(prefix="warm-")
    return os.environ[DIRECTORY]


@cache
def _directory() -> str:
    return os.environ.get(DIRECTORY) or share()


@contextmanager
def _alone(path: str) -> Iterator[None]:
    """Nobody else connects to the process of this path, which does not end."""
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _start(command: list[str], at_import: Mapping[str, str], listener: socket.socket) -> None:
    """Not by `subprocess`, which would wait for it: the process may outlive this one."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
    # What modules ask for when they are imported: consoles their width, numpy and torch how many threads to start.
    environment |= at_import
    environment |= {"COLUMNS": "120", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", ROOM: "." * ROOM_BYTES}
    actions = [
        (os.POSIX_SPAWN_DUP2, listener.fileno(), LISTENER),
        *((os.POSIX_SPAWN_OPEN, standard, os.devnull, os.O_RDWR, 0) for standard in (0, 1)),
    ]
    os.posix_spawnp(command[0], command, environment, file_actions=actions)


@cache
def warm(what: str, view: tuple[str, ...] = (), **at_import: str) -> Warm:
    """That of this run, of its view of the file system, and of what takes effect at import."""
    made = Warm(what, view, at_import)
    atexit.register(made.close)
    return made


def run_script(*arguments: str, timeout_s: float) -> tuple[int, str]:
    """Exit code and output of a script, which ends together with all that it has forked."""
    with tempfile.TemporaryFile() as output:
        process = warm(SCRIPTS).start(arguments, Path.cwd(), os.environ, output.fileno(), output.fileno())
        try:
            code = process.wait(timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks that wait for one that failed
        output.seek(0)
        return code, output.read().decode()


# ---------------------------------------------------------------- the process that forks


def _serve(path: str, listener: socket.socket) -> None:
    """Returns in a child, in the place that it wants; ends the process when nobody is connected any more."""
    forks: dict[socket.socket, set[int]] = {}  # of each connection
    while True:
        for ready in select.select([listener, *forks], [], [])[0]:
            if ready is listener:
                forks[listener.accept()[0]] = set()
                continue
            raw, descriptors, _, _ = _received(ready)
            if not raw:
                ready.close()
                for pid in forks.pop(ready):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                continue
            request = json.loads(raw)
            if "wait" in request:
                _, status = os.waitpid(request["wait"], 0)
                forks[ready].discard(request["wait"])
                answer = os.waitstatus_to_exitcode(status)
            elif (answer := os.fork()) == 0:
                for each in (listener, *forks):
                    each.close()
                _become(request, descriptors)
                return
            else:
                forks[ready].add(answer)
            for descriptor in descriptors:
                os.close(descriptor)
            with suppress(BrokenPipeError):  # the next look at it finds its end
                ready.send(str(answer).encode())
        if not forks and _ended(path, listener):
            sys.exit()


def _ended(path: str, listener: socket.socket) -> bool:
    """Whether nobody has connected meanwhile, nor will."""
    try:
        with _alone(path):
            if select.select([listener], [], [], 0)[0]:
                return False
            os.unlink(path)
    except FileNotFoundError:  # the run is over
        pass
    return True


def _received(connection: socket.socket) -> tuple[bytes, list[int], int, Any]:
    try:
        return socket.recv_fds(connection, REQUEST_BYTES_MAX, DESCRIPTORS_MAX)
    except ConnectionResetError:  # it was killed before it read an answer
        return b"", [], 0, None


def _become(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """The process that the command would be."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    for descriptor, standard in zip(descriptors[:2], (1, 2), strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ.update(zip(request["inherited"], map(str, descriptors[2:]), strict=True))
    show_environment(os.environ)
    if os.environ.get(UNBUFFERED):
        write_at_once()
    sys.argv = ["holdfast", *request["arguments"]]


def write_at_once() -> None:
    """As a new interpreter does with PYTHONUNBUFFERED, or with -u."""
    for stream in (sys.stdout, sys.stderr):
        cast("TextIOWrapper", stream).reconfigure(write_through=True)


def show_environment(environment: Mapping[str, str]) -> None:
    """What /proc/PID/environ shows of this process, by which tests find what they have started."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end of proc(5)
    shown = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    assert len(shown) < end - start, f"an environment of {len(shown)} bytes; there is room for {end - start}"
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        memory.write(shown.ljust(end - start, b"\0"))


def end_at_once(run: Callable[[], object]) -> None:
    """Run it to its end, and end without what only frees memory: that would copy every page that it shares, which takes a
    quarter of a second with torch."""
    code, interrupted = 0, False
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _main(what: str, path: str) -> None:
    gc.disable()  # until everything is imported
    del os.environ[ROOM]  # the memory remains
    if what == COMMANDS:
        from holdfast.cli import main

        main.application()  # with every subcommand
    elif what == SCRIPTS:
        from holdfast.train.warm import template

        template.prepare(preload=[], path=[])
    elif what == STACK:
        import warm_stack

        imports = warm_stack.Imports()
    else:
        importlib.import_module(f"{what}.service")
        importlib.import_module("anyio._backends._asyncio")
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, "a process of one thread can be forked"
    gc.freeze()  # its pages stay shared
    gc.enable()
    use_huge_pages()
    _serve(path, socket.socket(fileno=LISTENER))
    if what == COMMANDS:
        end_at_once(main.main)
    elif what == SCRIPTS:
        end_at_once(lambda: be_script(sys.argv[1:]))
    elif what == STACK:
        end_at_once(lambda: imports.run(*sys.argv[1:]))
    elif len(sys.argv) > 1:
        end_at_once(lambda: be_script(sys.argv[1:]))
    else:
        end_at_once(lambda: runpy.run_module(what, run_name="__main__", alter_sys=True))


def be_script(argv: Sequence[str]) -> None:
    """As `python argv[0] …` does."""
    sys.argv = [*argv]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    # What libraries have opened in the process that started this one.
    os.closerange(LISTENER + 1, os.sysconf("SC_OPEN_MAX"))
    _main(sys.argv[1], sys.argv[2])
