"""`holdfast` commands in forks of a process that has imported them: what each does, without a third of a second of imports.

`WarmCommands` belongs to the tests; this file run as a script is the process that forks.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

REQUEST_BYTES_MAX = 64 << 10
PR_SET_PDEATHSIG = 1


class WarmCommands:
    """One forking process; commands run one after the other."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                # What modules ask for when they are imported: consoles their width, numpy how many threads it starts.
                env={**environment, "COLUMNS": "120", "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours

    def __call__(
        self, arguments: Sequence[str], directory: Path, environment: Mapping[str, str], timeout_s: float
    ) -> tuple[int, str, str]:
        """Exit code, as subprocess has it, standard output, standard error. TimeoutError ends the command."""
        request = {"arguments": list(arguments), "directory": str(directory), "environment": dict(environment)}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [out.fileno(), err.fileno()])
            self._socket.settimeout(timeout_s)
            try:
                code = int(self._socket.recv(64))
            except (OSError, ValueError):
                self.close()
                raise
            said = []
            for file in (out, err):
                file.seek(0)
                said.append(file.read().decode())
        return code, said[0], said[1]

    def close(self) -> None:
        """A command that still runs is killed with the process that has forked it."""
        self._socket.close()
        self._process.kill()
        self._process.wait()
        warm_commands.cache_clear()


@cache
def warm_commands() -> WarmCommands:
    """Those of this test process."""
    made = WarmCommands()
    atexit.register(made.close)
    return made


# ---------------------------------------------------------------- the process that forks


def _serve(requests: socket.socket) -> None:
    """Returns in a child, in the place that its command wants; ends the process when nobody asks any more."""
    while True:
        raw, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, 2)
        if not raw:
            sys.exit()
        child = os.fork()
        if child == 0:
            requests.close()
            _become(json.loads(raw), descriptors)
            return
        for descriptor in descriptors:
            os.close(descriptor)
        _, status = os.waitpid(child, 0)
        requests.send(str(os.waitstatus_to_exitcode(status)).encode())


def _become(request: Mapping[str, object], descriptors: Sequence[int]) -> None:
    """The process that `holdfast ARGUMENTS` would be."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    for descriptor, standard in zip(descriptors, (1, 2), strict=True):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    os.chdir(str(request["directory"]))
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    sys.argv = ["holdfast", *request["arguments"]]  # type: ignore[misc]


if __name__ == "__main__":
    from holdfast.cli import main

    main.application()  # with every subcommand
    assert threading.active_count() == len(os.listdir("/proc/self/task")) == 1, "a process of one thread can be forked"
    _serve(socket.socket(fileno=int(sys.argv[1])))
    main.main()
