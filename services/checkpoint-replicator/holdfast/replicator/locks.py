"""Finds the processes that hold a read lock on a file, from /proc/locks."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

LOCKS = Path("/proc/locks")


def readers(paths: Iterable[Path]) -> dict[Path, tuple[int, ...]]:
    """Return the processes that hold a lock on each locked file, sorted. A process of another container is 0 or negative."""
    inodes: dict[tuple[int, int, int], Path] = {}
    for path in paths:
        with suppress(OSError):
            found = path.stat()
            inodes[os.major(found.st_dev), os.minor(found.st_dev), found.st_ino] = path
    held: dict[Path, set[int]] = {}
    for line in LOCKS.read_text().splitlines():
        # "4: FLOCK  ADVISORY  READ 4711 00:2d:8812 0 EOF"; a waiting process has "->" as the second field
        fields = line.split()
        if len(fields) < 6 or fields[1] != "FLOCK" or fields[3] != "READ":
            continue
        major, minor, inode = fields[5].split(":")
        if (found_path := inodes.get((int(major, 16), int(minor, 16), int(inode)))) is not None:
            held.setdefault(found_path, set()).add(int(fields[4]))
    return {path: tuple(sorted(pids)) for path, pids in held.items()}


def name_of(pid: int) -> str:
    """Return the name of a process for messages."""
    if pid == os.getpid():
        return f"this replicator (pid {pid})"
    try:
        return f"{Path('/proc', str(pid), 'comm').read_text().strip()} (pid {pid})"
    except OSError:
        return f"pid {pid}" if pid > 0 else "a process of another container"
