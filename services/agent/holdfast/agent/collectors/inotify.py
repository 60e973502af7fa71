"""Waits for changes of a file with inotify(7), because polling a hundred times per second would cost more than all other
work."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Self

import anyio

_IN_MODIFY, _IN_ATTRIB, _IN_DELETE_SELF, _IN_MOVE_SELF = 0x002, 0x004, 0x400, 0x800
_MASK = _IN_MODIFY | _IN_ATTRIB | _IN_DELETE_SELF | _IN_MOVE_SELF  # IN_ATTRIB: the file's last name was removed
_EVENTS_BYTES_MAX = 16 << 10

_libc = ctypes.CDLL(None, use_errno=True)


class FileWatch:
    """A watch of one file, by inode. No change since the start of the watch, or since the last `changed`, is missed."""

    def __init__(self, path: Path) -> None:
        """Raises OSError that names the path."""
        self._fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC), path)
        try:
            _checked(_libc.inotify_add_watch(self._fd, os.fsencode(path), _MASK), path)
        except OSError:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    async def changed(self, timeout_s: float) -> None:
        """Wait for a change, at most `timeout_s`, because inotify does not report writes of other machines to a network file
        system."""
        with anyio.move_on_after(timeout_s):
            await anyio.wait_readable(self._fd)
            os.read(self._fd, _EVENTS_BYTES_MAX)


def _checked(result: int, path: Path) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))
    return result
