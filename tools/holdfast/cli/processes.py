"""Ends the processes of a stack."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence

import psutil

from holdfast.runtime.processes.survivors import Survivor

STOP_TIMEOUT_S = 15.0

Process = subprocess.Popen[bytes] | Survivor


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants, the parent first so that it cannot react."""
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal (SIGSTOP, Ctrl-Z), but not by a debugger."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def stop_all(processes: Sequence[Process], number: signal.Signals = signal.SIGTERM) -> None:
    """Send the signal to all processes at once, then SIGKILL to those that have not ended at the deadline."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            process.wait()
