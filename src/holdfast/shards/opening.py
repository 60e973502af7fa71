"""Opens a stored file safely, whatever is at its path."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

from holdfast.domain.errors import IntegrityError

ASIDE = ".corrupt"  # suffix of quarantined files
_NO_FILE = (errno.EISDIR, errno.ELOOP, errno.ENXIO)


def open_stored(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return the descriptor.

    Raises FileNotFoundError, IntegrityError if the path is not a file (a directory, a pipe, a dangling link), and OSError if it
    may be a file but cannot be opened now.
    """
    try:
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)  # without O_NONBLOCK, opening a pipe would block
    except OSError as error:
        if error.errno in _NO_FILE or (error.errno == errno.ENOENT and path.is_symlink()):
            raise IntegrityError(f"{path} is not a file: {error.strerror}") from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise IntegrityError(f"{path} is not a file")
    return fd


def make_way(path: Path) -> None:
    """Remove the file at `path`, if there is one; a directory is moved aside. Raises OSError."""
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError:
        move_aside(path)


def move_aside(path: Path) -> Path:
    """Quarantine the file at `path`, replacing an earlier quarantined one. Raises FileNotFoundError, OSError."""
    aside = path.with_name(f"{path.name}{ASIDE}")
    if path.is_dir() or aside.is_dir():  # a rename can only replace a file by a file
        remove(aside)
    return path.rename(aside)


def remove(path: Path) -> None:
    """Delete the file or the directory tree at `path`, if it exists. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
