"""The forked child: becomes a worker, waits for `start`, and runs the user's script as `python script.py` would.

It restores what a fork lacks compared with a new interpreter: the environment, the standard streams, `sys.path`, `__main__`,
the size of torch's thread pool, NumPy's seed. (Python reseeds its own generator at a fork, and torch's default seed is a
constant.)

A normal end or `SystemExit` runs the interpreter's exit handlers (threads, `atexit`) and keeps the exit code. An exception
writes torchelastic's error file, prints its traceback and ends the process at once with code 1, because exit handlers of a
script that failed inside a collective often hang. Both leave by `os._exit`, which skips the teardown of a C++ runtime with
running threads."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NoReturn

from holdfast.domain import worker
from holdfast.domain.template import PROGRAM
from holdfast.train import error_file
from holdfast.train.observing import imports, observed_steps
from holdfast.train.rendezvous import wait_until_served
from holdfast.train.warm import build_locks, entry, output
from holdfast.train.warm.entry import Entry
from holdfast.train.warm.title import set_title

STORE_HEAD_START_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Launch:
    """What to run, and the descriptors to run it with."""

    entry: Entry
    env: Mapping[str, str]
    control: int
    stdout: int
    stderr: int


def run_script(launch: Launch) -> NoReturn:
    """Run the script. Never returns: the process ends with the script."""
    code = 1
    try:
        _become_worker(launch)
        control = socket.socket(fileno=launch.control)
        control.send(worker.encode("ready", pid=os.getpid(), votes=True))
        os.environ.update(_wait_for_start(control))
        control.detach()  # the trainer library opens the descriptor again by its number
        _let_rank_0_open_its_store()
        os.environ[worker.ENV_BEGAN_S] = repr(time.monotonic())
        imports.begin()
        if launch.entry.kind == PROGRAM:
            os.set_inheritable(launch.control, True)  # the program may use the trainer library
        else:
            observed_steps.observe(os.environ)
            build_locks.watch(os.environ)
        code = _run(launch)
    except BaseException:  # a failure of this module; no interpreter above would print it
        traceback.print_exc()
    finally:
        _flush()
        os._exit(code)


def _become_worker(launch: Launch) -> None:
    os.setsid()  # its own process group, so that the agent can signal it together with its children
    stdin = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((stdin, 0), (launch.stdout, 1), (launch.stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    output.open_streams()
    os.environ.clear()
    os.environ.update(launch.env)
    os.environ[worker.ENV_CONTROL_FD] = str(launch.control)
    set_title(os.environ.get(worker.ENV_JOB, ""), os.environ.get("RANK", ""))
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    threads, torch = os.environ.get("OMP_NUM_THREADS", ""), sys.modules.get("torch")
    if torch is not None and threads.isdigit() and int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))  # OpenMP reads the variable only when it is loaded


def _wait_for_start(control: socket.socket) -> Mapping[str, str]:
    """Wait for `start` and return its environment. End of file means that the agent has exited; the worker ends."""
    while raw := control.recv(worker.MESSAGE_BYTES_MAX):
        message = worker.decode(raw)
        match message.get("type"):
            case "start":
                return {str(name): str(value) for name, value in message["env"].items()}
            case "stop":
                break
    os._exit(0)


def _let_rank_0_open_its_store() -> None:
    """Wait for rank 0's store for a short time, so that a script that joins its process group immediately can connect.

    A script whose rank 0 opens the store later loses only this time.
    """
    if os.environ.get("RANK", "0") != "0" and "MASTER_PORT" in os.environ:
        wait_until_served(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), STORE_HEAD_START_S)


def _run(launch: Launch) -> int:
    """Run the script and return its exit code."""
    try:
        try:
            launch.entry.run()
        except SystemExit as exit_request:
            code = _exit_code(exit_request)
        else:
            code = 0
        if code == 0:
            observed_steps.done()
        imports.record()  # if the script had no step that could be observed
        # As the interpreter does first at its end: wait for threads.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException as error:
        _report(error)
        return 1
    return code


def _exit_code(request: SystemExit) -> int:
    """Return the exit code as the interpreter would: 0 for None, an integer as it is, 1 for anything else, which is
    printed."""
    match request.code:
        case None:
            return 0
        case int(code):
            return code & 0xFF
        case message:
            print(message, file=sys.stderr)  # noqa: T201
            return 1


def _report(error: BaseException) -> None:
    error = error.with_traceback(_own_frames_removed(error.__traceback__))
    error_file.write(os.environ.get(error_file.ENV, ""), error)
    sys.excepthook(type(error), error, error.__traceback__)


def _own_frames_removed(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback starting at the script's first frame; None for a syntax error in the script."""
    rest = trace
    while rest is not None and rest.tb_frame.f_code.co_filename in (__file__, entry.__file__):
        rest = rest.tb_next
    return rest


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            # A broken disk, or the script closed the stream; there is no other place to report this.
            pass
