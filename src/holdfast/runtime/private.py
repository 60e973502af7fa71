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
    """Make a directory with mode 0700, or use the one that is there, as it is.

    Raises `InvalidSpec` if it belongs to another user than this one and root, or if such a user has made it, a link on the way
    to it, or a directory above it in a place where everybody may (one with the sticky bit, such as /tmp). Raises `OSError` if
    it cannot be made.
    """
    path = path.absolute()
    for part in (*reversed(path.parents), path):
        _check_maker(path, part)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid not in (_ROOT, os.geteuid()):
        raise _refused(path, path, found)


def close_to_others(path: Path) -> None:
    """Take away what other users may do in a directory. Raises `OSError`."""
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        path.chmod(stat.S_IRWXU)


def _check_maker(path: Path, part: Path) -> None:
    try:
        found, place = part.lstat(), part.parent.lstat()
    except FileNotFoundError:
        return  # it will be made
    everybodys = place.st_mode & stat.S_ISVTX and place.st_mode & stat.S_IWOTH
    if (everybodys or stat.S_ISLNK(found.st_mode)) and found.st_uid not in (_ROOT, os.geteuid()):
        raise _refused(path, part, found)


def _refused(path: Path, whose: Path, found: os.stat_result) -> InvalidSpec:
    return InvalidSpec(
        "directory",
        str(path),
        f"one that nobody else has made: {whose} belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}",
    )
