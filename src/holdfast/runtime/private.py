"""Creates directories that other users of the machine can neither read nor have created in advance.

`/dev/shm/holdfast` and directories in `/tmp` have predictable names, in a place where all users may create them. A user who
creates such a directory first could read a checkpoint, or cause files elsewhere to be deleted through a symbolic link.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from holdfast.domain.errors import InvalidSpec

_ROOT = 0
_PASS = stat.S_IXGRP | stat.S_IXOTH


def make_private(path: Path) -> None:
    """Create a directory with mode 0700, or use an existing one without changing it.

    Raises `InvalidSpec` if the directory belongs to another user than this one and root. It is also raised if such a user has
    created a symbolic link in the path, or a part of the path in a directory where all users may create files (with the sticky
    bit, such as /tmp). Raises `OSError` if the directory cannot be created.
    """
    path = path.absolute()
    for part in (*reversed(path.parents), path):
        _check_maker(path, part)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid not in (_ROOT, os.geteuid()):
        raise _refused(path, path, found)


def make_passable(path: Path) -> None:
    """As `make_private`, for a directory that other users may pass through but not list: they reach the objects in it whose
    names they know and whose own permissions allow it. Parents that this creates are passable as well. Raises as `make_private`
    does."""
    missing = [part for part in (path, *path.absolute().parents) if not part.exists()]
    make_private(path)
    for part in {path, *missing}:
        let_pass(part.resolve())


def let_pass(path: Path) -> None:
    """Make one directory passable. That of another user stays as it is: whoever manages it decides who may pass. Raises
    `OSError`, also for a symbolic link."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(directory)
        if found.st_uid == os.geteuid() and found.st_mode & _PASS != _PASS:
            os.fchmod(directory, stat.S_IMODE(found.st_mode) | _PASS)
    finally:
        os.close(directory)


def close_to_others(path: Path) -> None:
    """Remove all permissions of other users for a directory. Raises `OSError`."""
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        path.chmod(stat.S_IRWXU)


def _check_maker(path: Path, part: Path) -> None:
    try:
        found, place = part.lstat(), part.parent.lstat()
    except FileNotFoundError:
        return  # `make_private` will create it
    is_shared = place.st_mode & stat.S_ISVTX and place.st_mode & stat.S_IWOTH
    if (is_shared or stat.S_ISLNK(found.st_mode)) and found.st_uid not in (_ROOT, os.geteuid()):
        raise _refused(path, part, found)


def _refused(path: Path, whose: Path, found: os.stat_result) -> InvalidSpec:
    return InvalidSpec(
        "directory",
        str(path),
        f"a path without parts of other users: {whose} belongs to user {found.st_uid}, and this process runs as user "
        f"{os.geteuid()}",
    )
