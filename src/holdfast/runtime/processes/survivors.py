"""Child processes that outlive their starter and can be found by its successor.

In contrast to `runtime.children`, `noted` starts a program that is independent of its starter. The program's pid file is
written before the exec, so a running program can always be found. A pid alone may be reused by another process. Together with
the boot id and the start time of the process, it is unique.

    command = noted(["server", "--port", "0"], directory / "server.pid")   # the starter; then it is killed
    survivor = find(directory / "server.pid")                              # its successor: None if it has exited
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from holdfast.runtime.processes.readable import readable

BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
UNKNOWN_EXIT: Final = 256  # the exit code of a process that is not a child is unknown
_START_FIELD: Final = 19  # of /proc/PID/stat behind the name: start time in clock ticks since boot (proc(5), field 22)

# argv: the pid file, the program, its arguments. A full disk, which may have stderr too, must not prevent the start.
_NOTE = f"""\
import os, sys
path = sys.argv[1]
try:
    with open("/proc/self/stat") as stat, open({str(BOOT_ID)!r}) as boot:
        text = f"{{os.getpid()}} {{stat.read().rpartition(')')[2].split()[{_START_FIELD}]}} {{boot.read().strip()}}"
    with open(path + ".new", "w") as file:
        file.write(text)
    os.replace(path + ".new", path)
except OSError as error:
    try:
        os.write(2, f"{{path}} cannot be written, so a successor cannot find this process: {{error}}\\n".encode())
    except OSError:
        pass
os.execvp(sys.argv[2], sys.argv[2:])
"""


def noted(command: Sequence[str], pid_file: Path) -> list[str]:
    """Return the command line that runs `command` so that it outlives this process and is found by `find(pid_file)`."""
    return [sys.executable, "-I", "-S", "-c", _NOTE, os.fspath(pid_file), *command]


def find(pid_file: Path) -> Survivor | None:
    """Return the process that wrote `pid_file`, if it still runs."""
    try:
        pid, started, boot = pid_file.read_text().split()
        if boot != BOOT_ID.read_text().strip():
            return None
        survivor = Survivor(int(pid))
    except (OSError, ValueError):  # no file, not a pid file, or no such process
        return None
    # Check it after opening the pidfd, so that the pid cannot be reused unnoticed.
    if _started(survivor.pid) != started or survivor.poll() is not None:
        survivor.close()
        return None
    return survivor


class Survivor:
    """A running process that is not a child, with the needed part of `subprocess.Popen`. Its exit code stays unknown."""

    def __init__(self, pid: int) -> None:
        """Raises `ProcessLookupError` if there is no such process."""
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return `UNKNOWN_EXIT` if it has exited, else None."""
        if self.returncode is None and readable(self._pidfd, 0.0):
            self.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not readable(self._pidfd, timeout):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.close()
        return UNKNOWN_EXIT

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Close the pidfd."""
        if self.returncode is None:
            self.returncode = UNKNOWN_EXIT
            os.close(self._pidfd)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                pass  # it has just exited


def _started(pid: int) -> str:
    """Return the process's start time; empty if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[_START_FIELD]
    except OSError:
        return ""
