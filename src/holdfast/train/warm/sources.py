"""Notices that the files of imported modules have changed: a package was upgraded, or a module edited. A worker that is forked
then would have old code in the imported modules, and new code in those that it imports itself.

Not watched are the interpreter's own modules and Holdfast's: their upgrade replaces the agent."""

from __future__ import annotations

import os
import sys
import sysconfig
import time
from typing import Final

from holdfast.train.observing import imports

CHECK_S_MAX: Final = 0.5  # for all files; a check of the packages' own files takes milliseconds and is always complete


class Sources:
    """The files of the modules that are imported now."""

    def __init__(self, began: float) -> None:
        """`began`: when the imports began (Unix s). Of a package whose file was written since, the code may be older."""
        installed = tuple(f"{root}{os.sep}" for root in imports.roots())
        self._files: dict[str, tuple[str, str | None]] = {}  # by module, its file as it was; None = not known
        for name, module in list(sys.modules.items()):
            origin = getattr(getattr(module, "__spec__", None), "origin", None)
            if not isinstance(origin, str) or not os.path.isabs(origin) or is_of_interpreter(origin):
                continue
            if name.partition(".")[0] != "holdfast":
                found, written = _look(origin)
                is_older = written < began or not origin.startswith(installed)
                self._files[name] = (origin, found if is_older else None)
        self._packages = [name for name in self._files if "." not in name]
        self._others = [name for name in self._files if "." in name]

    def changed(self) -> str:
        """Return the name of a module whose file has changed; empty = none is known."""
        until = time.monotonic() + CHECK_S_MAX
        for name in self._packages:
            if self._has_changed(name):
                return name
        for name in self._others:
            if self._has_changed(name):
                return name
            if time.monotonic() > until:  # on a slow file system: what an installer replaces has been seen above
                break
        return ""

    def _has_changed(self, name: str) -> bool:
        origin, known = self._files[name]
        return known is None or _look(origin)[0] != known


def is_of_interpreter(origin: str) -> bool:
    """Whether a file belongs to Python itself."""
    return origin.startswith(_INTERPRETER) and not origin.startswith(_PACKAGES)


_INTERPRETER = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(
    f"{sysconfig.get_path(name)}{os.sep}{directory}{os.sep}"
    for name in ("stdlib", "platstdlib")
    for directory in ("site-packages", "dist-packages")
)


def _look(path: str) -> tuple[str, float]:
    """Return what changes when the file is replaced or written, and when its inode was changed (Unix s)."""
    try:
        stat = os.stat(path)
    except OSError:  # deleted, or inside of an archive
        return "", 0.0
    return f"{stat.st_mtime_ns} {stat.st_size} {stat.st_ino}", stat.st_ctime
