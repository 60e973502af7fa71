"""The agent's directory: locked by one agent at a time, and cleared of processes of an earlier agent.

An agent's children end with it, but not the processes that *they* started (a data loader of a killed worker, for example). All
of them have `MARK` in their environment, so the next agent of the directory finds and kills them before it starts anything.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from holdfast.domain.errors import Conflict, HoldfastError, Unavailable
from holdfast.runtime.private import close_to_others, make_passable, make_private
from holdfast.runtime.processes.readable import readable

log = structlog.get_logger("holdfast.agent.directory")

MARK = "HOLDFAST_AGENT_TREE"
KILL_TIMEOUT_S = 10.0


@contextmanager
def claimed(agent_dir: Path, memory_dir: Path, disk_dir: Path, *, passable: bool = False) -> Iterator[None]:
    """Create the directories, for this user alone, and lock the agent's directory. `passable`: other users may pass through
    them.

    Raises `Conflict` if another agent holds the lock, and `HoldfastError` if a directory belongs to another user or cannot be
    used."""
    for path in (agent_dir, memory_dir, disk_dir):
        try:
            (make_passable if passable else make_private)(path)
            if not passable and path == agent_dir:
                close_to_others(path)
            (probe := path / f".write-{os.getpid()}").touch()
            probe.unlink()
        except OSError as error:
            raise HoldfastError(f"the directory {path} cannot be used: {error.strerror}") from error
    lock = os.open(agent_dir / "agent.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(f"another agent runs in {agent_dir}; give this one a directory of its own") from None
        end_leftovers(agent_dir)
        yield
    finally:
        os.close(lock)


def end_leftovers(agent_dir: Path) -> list[int]:
    """SIGKILL every process of an earlier agent of this directory. Returns their pids when all have exited."""
    mark = f"{MARK}={agent_dir}".encode()
    pids = [pid for pid in _own_processes() if mark in _environment(pid)]
    for pid in pids:
        log.warning("process of an earlier agent killed", pid=pid)
        _end(pid)
    return pids


def remove_images(memory_dir: Path, job: str) -> None:
    """Delete a job's shared memory. Raises `HoldfastError` if a part of it cannot be deleted."""
    try:
        shutil.rmtree(memory_dir / job)
    except FileNotFoundError:
        pass  # the job has not saved on this node
    except OSError as error:
        raise HoldfastError(f"the images of {job} cannot be removed: {error}") from error


def _own_processes() -> Iterator[int]:
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            yield int(entry.name)


def _environment(pid: int) -> list[bytes]:
    """Return a process's environment at its last exec; empty if it cannot be read or has exited."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except (PermissionError, FileNotFoundError, ProcessLookupError):
        return []


def _end(pid: int) -> None:
    """Kill a process through a pidfd and wait for its exit."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    with os.fdopen(pidfd) as watched:
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return
        if not readable(watched, KILL_TIMEOUT_S):
            raise Unavailable(f"process {pid} of a former agent survived SIGKILL for {KILL_TIMEOUT_S:g} s")
