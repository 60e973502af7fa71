"""Atomic writes of small files, and whether files were replaced."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file atomically. Unless `durable` it is not fsynced: for data that may be lost in a power failure. Raises
    OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)
    if durable:
        _sync_directory(path.parent)


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically that only its user can read. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def state_of(files: Sequence[Path]) -> tuple[tuple[int, ...], ...]:
    """Return a value that changes when one of the files is replaced or written. The item of a missing file is empty."""
    return tuple(_stat(path) for path in files)


def _stat(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
