"""Load, memory and disk space, every five seconds; metrics that take longer, every sixth time."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil

from holdfast.agent.collectors.protocol import Probe, Surroundings
from holdfast.domain.signals import HostSample

INTERVAL_S = 5.0
DEADLINE_S = 5.0
SLOW_EVERY = 6
PROC = Path("/proc")
WRITE_BYTES = 4096

_STA_UNSYNC, _STA_NANO = 0x0040, 0x2000
_libc = ctypes.CDLL(None, use_errno=True)


class _Timex(ctypes.Structure):
    """The first fields of struct timex (adjtimex(2)), padded to its size."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


def build(surroundings: Surroundings) -> Probe:
    disks = tuple(dict.fromkeys((surroundings.agent_dir, surroundings.disk_dir, surroundings.memory_dir)))
    host = Host(surroundings.node, disks, surroundings.files_left)
    return Probe("host", surroundings.node, host.ask, interval_s=INTERVAL_S, deadline_s=DEADLINE_S)


class Host:
    def __init__(
        self, node: str, disks: tuple[Path, ...], files_left: Callable[[], tuple[int, int]] | None = None
    ) -> None:
        self._node, self._disks, self._files_left = node, disks, files_left
        self._asked = 0

    def ask(self) -> tuple[HostSample]:
        slow = self._asked % SLOW_EVERY == 0
        self._asked += 1
        found = sample(self._node, self._disks, slow=slow)
        if self._files_left is not None:
            left, limit = self._files_left()
            found = replace(found, files_left=left, files_max=limit)
        return (found,)


def sample(node: str, disks: tuple[Path, ...], *, slow: bool = False) -> HostSample:
    """`slow`: also disk latency, blocked tasks and the clock. Raises OSError that names the path of a missing disk."""
    memory = psutil.virtual_memory()
    usages = [(path, psutil.disk_usage(str(path))) for path in disks]
    return HostSample(
        node=node,
        at=time.time(),
        load1=os.getloadavg()[0],
        cpus=os.cpu_count() or 1,
        memory_used=memory.total - memory.available,
        memory_total=memory.total,
        disks=tuple((str(path), usage.used, usage.total) for path, usage in usages),
        disk_latency=_latencies(disks) if slow else (),
        blocked=blocked_tasks() if slow else None,
        clock_offset_s=clock_offset_s() if slow else None,
    )


def _latencies(disks: tuple[Path, ...]) -> tuple[tuple[str, float], ...]:
    found = ((str(path), write_latency(path)) for path in disks)
    return tuple((path, seconds) for path, seconds in found if seconds is not None)


def write_latency(directory: Path) -> float | None:
    """Return the seconds for one small fsynced write; inf if the disk is not writable (full, read-only, missing).

    Returns None if unnamed files are not supported, as on most network file systems.
    """
    started = time.monotonic()
    try:
        # An unnamed file, so that other processes cannot find it.
        fd = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return None if error.errno in (errno.EOPNOTSUPP, errno.EISDIR) else math.inf
    try:
        os.write(fd, bytes(WRITE_BYTES))
        os.fsync(fd)
    except OSError:
        return math.inf
    finally:
        os.close(fd)
    return time.monotonic() - started


def blocked_tasks(proc: Path = PROC) -> int:
    """Return the number of processes in uninterruptible sleep, which wait for a disk, a network file system or a driver."""
    return sum(_is_blocked(entry) for entry in proc.iterdir() if entry.name.isdecimal())


def _is_blocked(process: Path) -> bool:
    try:
        stat = (process / "stat").read_bytes()
    except OSError:
        return False  # it has exited since the listing
    return stat.rpartition(b")")[2].split(None, 1)[:1] == [b"D"]  # the process name may contain spaces and parentheses


def clock_offset_s() -> float | None:
    """Return the clock's remaining offset from adjtimex(2); None if the clock is not synchronised."""
    timex = _Timex()
    if _libc.adjtimex(ctypes.byref(timex)) < 0 or timex.status & _STA_UNSYNC:
        return None
    return float(timex.offset) / (1e9 if timex.status & _STA_NANO else 1e6)
