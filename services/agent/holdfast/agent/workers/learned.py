"""The modules that the scripts of this node import: recorded by a worker at its first step (`holdfast.train.imports`), and read
when the next worker is started.

The lists are stored in a directory of the agent, by script, module or command. A job that is submitted again therefore begins
with the list of its last run."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import structlog

from holdfast.agent.workers.apart import open_untrusted
from holdfast.domain.job import LaunchSpec

log = structlog.get_logger("holdfast.agent.learned")

AUTO = "auto"  # value of `preload`
FILE_BYTES_MAX = 1 << 20
MODULES_MAX = 4000
MORE_MIN = 20  # number of new modules that justifies another template


class Learned:
    """The lists in `directory`. The user's process writes the files, so a file that is not a list of names is ignored."""

    def __init__(self, directory: Path, uid: int | None = None) -> None:
        """`uid`: the user of the workers; None = that of this process."""
        self._directory = directory
        self._uid = os.geteuid() if uid is None else uid
        self._taken: dict[Path, tuple[str, ...]] = {}  # by file, the list for which templates were started

    def path(self, launch: LaunchSpec) -> Path:
        """Return the file to which a worker of this launch writes its list."""
        key = json.dumps([launch.script, launch.module, launch.command])
        return self._directory / f"{zlib.crc32(key.encode()):08x}.json"

    def modules(self, launch: LaunchSpec) -> tuple[str, ...]:
        """Return the modules to import for this launch. Fewer than `MORE_MIN` new modules do not change the list."""
        if AUTO not in launch.preload:
            return ()
        path = self.path(launch)
        found, taken = _read(path, self._uid), self._taken.get(path, ())
        if len(set(found) - set(taken)) >= MORE_MIN:
            self._taken[path] = found
        return self._taken.get(path, ())


def _read(path: Path, uid: int) -> tuple[str, ...]:
    try:
        with open(open_untrusted(path, uid), "rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
        if not 0 < len(raw) <= FILE_BYTES_MAX:
            return ()
        names = json.loads(raw)
    except (OSError, ValueError, RecursionError):
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return ()
    good = (name for name in dict.fromkeys(names) if all(part.isidentifier() for part in name.split(".")))
    return tuple(good)[:MODULES_MAX]
