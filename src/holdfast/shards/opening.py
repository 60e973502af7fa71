"""Opens stored files safely: the path may have been replaced by a link, a pipe or a directory."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Collection
from pathlib import Path

from holdfast.domain.errors import IntegrityError

ASIDE = ".corrupt"  # suffix of quarantined files
_NO_FILE = (errno.EISDIR, errno.ELOOP, errno.ENXIO)


def open_stored(path: Path, flags: int = os.O_RDONLY, *, owners: Collection[int] | None = None) -> int:
    """Open a regular file and return the descriptor.

    `owners`: the uids that may write in the directory. If given, no symbolic link is followed, and a file of another user or
    with a second name is not opened, because it may be a link to a file that these users cannot read themselves.

    Raises FileNotFoundError, IntegrityError if the path is not such a file (a directory, a pipe, a dangling link), and OSError
    if it may be a file but cannot be opened now.
    """
    own = 0 if owners is None else os.O_NOFOLLOW
    try:
        fd = os.open(path, flags | own | os.O_CLOEXEC | os.O_NONBLOCK)  # without O_NONBLOCK, opening a pipe would block
    except OSError as error:
        if error.errno in _NO_FILE or (error.errno == errno.ENOENT and path.is_symlink()):
            raise IntegrityError(f"{path} is not a file: {error.strerror}") from error
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise IntegrityError(f"{path} is not a file")
    if owners is not None and (found.st_uid not in owners or found.st_nlink > 1):
        os.close(fd)
        raise IntegrityError(
            f"{path} is a file of user {found.st_uid} with {found.st_nlink} names, not of its worker alone"
        )
    return fd


def open_temporary(path: Path) -> int:
    """Open a file for writing, which is created if it does not exist, and return the descriptor. An object in its place that is
    not a file of this name alone (a symbolic link, a pipe, a second name of another file) is removed first. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        fd = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
    else:
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
            return fd
        os.close(fd)
    make_way(path)
    return os.open(path, flags | os.O_EXCL, 0o600)


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
