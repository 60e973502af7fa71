"""The process between an agent and one worker: the worker's parent, which kills the processes that the worker leaves.

    agent (subreaper) ── reaper ── worker ── processes of the script
      └── template: forks the reaper and has no other relation to it

* **No process that a worker starts outlives it.** The reaper is a *child subreaper* (prctl(2)): a daemon in its own session
  becomes the reaper's child when its parent exits. After the worker's exit, all remaining descendants of the reaper are killed
  until `waitid` reports no more children. Only direct children are killed, because their pids cannot be reused before they are
  reaped; their children become direct children next.
* **Shared memory does not stay behind.** The helper processes that delete the named shared memory of a killed process
  (Python's resource tracker, torch's manager) end by themselves when all processes that may use it have ended. They are
  given `CLEANING_S_MAX` for that: otherwise each restart would leave the script's segments in /dev/shm.
* **A template may exit.** The reaper is forked twice, so that the agent becomes its parent, and the kernel ties it to the agent
  (PR_SET_PDEATHSIG), as the worker is tied to the reaper. If the agent exits, both are killed at once; if a template exits,
  nothing happens.
* **The exit status is reported once**, on the reaper's own link to the agent (`holdfast.domain.template`). The end of the link
  means that no process is left.

A blocked `waitid` costs nothing while the worker runs. Orphans of the script are reaped here as well.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import socket
import time
from contextlib import suppress
from typing import Final

from holdfast.domain import template as protocol

PR_SET_PDEATHSIG: Final = 1
PR_SET_NAME: Final = 15
PR_SET_CHILD_SUBREAPER: Final = 36
NAME: Final = b"holdfast-reaper"
WORKER_NAME: Final = b"python"
COMMANDS_MAX: Final = 4
SEARCHES_MAX: Final = 10
COMMAND_BYTES_MAX: Final = 200
_TITLE: Final = "holdfast: "  # of a worker (`title.py`), and of its forks
_HELPERS: Final = re.compile(r"multiprocessing\.(?:resource_tracker|forkserver)")  # they end with their parent
_CLEANERS: Final = re.compile(r"\bresource_tracker\b|\btorch_shm_manager\b")
CLEANING_S_MAX: Final = 2.0

_libc = ctypes.CDLL(None, use_errno=True)


def fork_worker(link: socket.socket, agent: int, unneeded: tuple[int, ...]) -> None:
    """Become the reaper and fork the worker. Called in an intermediate fork of the template; returns only in the worker.

    `unneeded` are the worker's descriptors, which the reaper closes. Errors are reported on `link`.
    """
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the template ignores it
        # Before the agent adopts it, because the agent kills adopted processes of another session that are not reapers.
        _prctl(PR_SET_NAME, NAME)
        if os.fork():
            os._exit(0)  # the reaper's parent is the agent now
        os.setsid()  # its own session, because the end of the template kills the template's process group
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        _until_child_of(agent)
        die_with_parent(agent)
        parent = os.getpid()
        worker = os.fork()
        if worker == 0:
            die_with_parent(parent)
            _prctl(PR_SET_NAME, WORKER_NAME)
            link.close()
            return
    except OSError as error:
        _send(link, protocol.encode("fork_failed", reason=str(error)))
        os._exit(1)
    for fd in unneeded:
        os.close(fd)
    # Before the worker is reaped, so its pid cannot have been reused.
    pidfds = [os.pidfd_open(worker), os.pidfd_open(parent)]
    socket.send_fds(link, [protocol.encode("forked", pid=worker)], pidfds)
    for fd in pidfds:
        os.close(fd)
    _follow(worker, link)
    os._exit(0)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent exits. Exits now if the parent has already exited."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _until_child_of(agent: int) -> None:
    """Wait until the first parent has exited. The kernel assigns the new parent before it reports the exit."""
    first = os.getppid()
    if first == agent:
        return
    try:
        ended = os.pidfd_open(first)
    except ProcessLookupError:
        return
    if os.getppid() == first:  # otherwise the pid may belong to another process by now
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        poll.poll()
    os.close(ended)


def _follow(worker: int, link: socket.socket) -> None:
    """Wait until the worker and all processes that it started have ended."""
    while True:
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None  # only WNOHANG returns None
        if ended.si_pid == worker:
            break
        os.waitid(os.P_PID, ended.si_pid, os.WEXITED)  # an orphan of the script
    by_exit = ended.si_code == os.CLD_EXITED
    _send(
        link,
        protocol.encode(
            "exited",
            exit_code=ended.si_status if by_exit else None,
            signal=None if by_exit else ended.si_status,
            at=time.time(),
            uptime_s=time.monotonic(),
            left=_commands(worker) if by_exit and ended.si_status == 0 else [],
        ),
    )
    os.waitid(os.P_PID, worker, os.WEXITED)
    _end_children()
    _send(link, protocol.encode("cleared"))


def _commands(worker: int) -> list[str]:
    """Return the command lines of processes that a worker has left although it ended well: a daemon may be what trains."""
    known = {os.getpid(), worker}  # an ended child stays listed until this process waits for it
    for _ in range(SEARCHES_MAX):
        family, found = _search(worker)
        if found or family == known:
            break
        known = family  # a process that has ended meanwhile may have started another one, which the list of /proc lacks
    return found[:COMMANDS_MAX]


def _search(worker: int) -> tuple[set[int], list[str]]:
    """Return the processes below this one, and the command lines of those that are neither the worker nor helpers."""
    found, family = [], {os.getpid()}
    # In this order a parent comes before its children, unless numbers have started again. A daemon's parent may be exiting.
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        if _parent(pid) not in family:
            continue
        family.add(pid)
        command = _command(pid)
        if pid != worker and command and not _HELPERS.search(command):  # a process that exits has no command line
            found.append("a fork of itself" if command.startswith(_TITLE) else command)
    return family, found


def _command(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as cmdline:
        return cmdline.read(COMMAND_BYTES_MAX).replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _end_children() -> None:
    spare_until = time.monotonic() + CLEANING_S_MAX
    while _reap_ended():
        children = _children()
        left_s = spare_until - time.monotonic()
        cleaners = [pid for pid in children if _CLEANERS.search(_command(pid))] if left_s > 0 else []
        others = set(children).difference(cleaners)
        if cleaners and not others:
            _await_end(cleaners, left_s)
            continue
        if not sum(map(_kill, others)):
            return  # a set-user-ID program: the kernel refuses the signal
        os.waitid(os.P_ALL, 0, os.WEXITED)


def _await_end(children: list[int], at_most_s: float) -> None:
    """Wait until one of these children has exited."""
    pidfds, poll = [os.pidfd_open(pid) for pid in children], select.poll()
    for pidfd in pidfds:
        poll.register(pidfd, select.POLLIN)
    poll.poll(at_most_s * 1000)
    for pidfd in pidfds:
        os.close(pidfd)


def _reap_ended() -> bool:
    """Whether a child is left that has not exited."""
    try:
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is not None:
            pass
    except ChildProcessError:
        return False
    return True


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except PermissionError:
        return False
    return True


def _children() -> list[int]:
    """Return the pids of this process's children, zombies included."""
    me, found = os.getpid(), []
    for name in os.listdir("/proc"):
        if name.isdecimal() and _parent(int(name)) == me:
            found.append(int(name))
    return found


def _parent(pid: int) -> int:
    """Return the parent's pid; 0 if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[1])  # the process name may contain any character
    except OSError:
        return 0


def _send(link: socket.socket, raw: bytes) -> None:
    try:
        link.send(raw)
    except OSError:
        pass  # the agent has closed the link: it no longer waits for this worker


def _prctl(option: int, value: int | bytes) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")
