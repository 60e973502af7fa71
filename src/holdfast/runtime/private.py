"""Directories that no other user of the machine reads, or has prepared.

`/dev/shm/holdfast` and directories in `/tmp` have names that everybody can guess, in a place where everybody may create them.
Who gets there first could read a checkpoint, or have files deleted elsewhere through a symbolic link.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from holdfast.domain.errors import InvalidSpec

_ROOT = 0


def make_private(path: Path) -> None:
    """Make a directory with mode 0700, or take away what others may do in one that this user has.

    Raises `InvalidSpec` if it is a symbolic link or belongs to another user, or if somebody else than this user and root has
    made a directory above it in a place where everybody may (one with the sticky bit, such as /tmp). Raises `OSError` if it
    cannot be made.
    """
    path = path.absolute()
    for above in reversed(path.parents):
        _check_owner(path, above)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = _opened(path)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid():
            raise _refused(path, path, found)
        if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            os.fchmod(folder, 0o700)
    finally:
        os.close(folder)


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise InvalidSpec("directory", str(path), "a directory, and not a symbolic link") from error
        raise


def _check_owner(path: Path, above: Path) -> None:
    try:
        found, place = above.lstat(), above.parent.lstat()
    except FileNotFoundError:
        return  # it will be made
    everybodys = place.st_mode & stat.S_ISVTX and place.st_mode & stat.S_IWOTH
    if everybodys and found.st_uid not in (_ROOT, os.geteuid()):
        raise _refused(path, above, found)


def _refused(path: Path, whose: Path, found: os.stat_result) -> InvalidSpec:
    return InvalidSpec(
        "directory",
        str(path),
        f"one that nobody else has made: {whose} belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}",
    )
