"""The directories of a trial: in memory, on the local disk, and with a short path for sockets. Deleted after the trial."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MEMORY_FILE_SYSTEM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Scratch:
    memory: Path
    disk: Path
    sockets: Path  # a Unix socket's path may have 107 characters


@contextmanager
def scratch(disk: Path) -> Iterator[Scratch]:
    """Create the directories; the one on the disk is below `disk`."""
    made = Scratch(
        memory=Path(tempfile.mkdtemp(prefix="hfb-", dir=MEMORY_FILE_SYSTEM)),
        disk=Path(tempfile.mkdtemp(prefix="trial-", dir=disk)),
        sockets=Path(tempfile.mkdtemp(prefix="hfb-")),
    )
    try:
        yield made
    finally:
        for directory in (made.memory, made.disk, made.sockets):
            shutil.rmtree(directory, ignore_errors=True)  # a process that is being killed may still write
