"""The directory in /dev/shm for the memory tiers of a local stack's nodes, removed with the stack.

The next stack on this machine removes the directory of a killed stack. A directory is in use while the pid in its name
exists, or while a lock in it is held. The starter and all agents share the lock by inheriting its descriptor, so it is held
until the last of them has ended.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import psutil

MEMORY_ROOT = Path("/dev/shm")
MEMORY_PREFIX = "holdfast-stack-"  # followed by the pid of the stack and a random part
_LOCK = "in-use"


class MemoryRoot:
    """Held until `remove` or `leave`."""

    def __init__(self, found: Path | None = None) -> None:
        """Create a directory, or use `found`, which an earlier stack has left, if it still exists."""
        if found is not None and found.parent == MEMORY_ROOT and found.is_dir():
            self.path = found
        else:
            self.path = Path(tempfile.mkdtemp(prefix=f"{MEMORY_PREFIX}{os.getpid()}-", dir=MEMORY_ROOT))
        self.lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self.lock, fcntl.LOCK_SH)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.leave()

    def leave(self) -> None:
        """Close this process's descriptor; other holders of the lock keep the directory."""
        os.close(self.lock)


def sweep() -> None:
    """Remove the directories that are no longer in use."""
    for root in MEMORY_ROOT.glob(f"{MEMORY_PREFIX}*-*"):
        owner = root.name.removeprefix(MEMORY_PREFIX).partition("-")[0]
        try:
            if owner.isdigit() and not psutil.pid_exists(int(owner)) and root.stat().st_uid == os.getuid():
                _remove_unless_locked(root)
        except OSError:
            continue  # it has just been removed, or is in use


def _remove_unless_locked(root: Path) -> None:
    """Remove the directory. Raises OSError if another process holds its lock."""
    lock = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(root, ignore_errors=True)
    finally:
        os.close(lock)
