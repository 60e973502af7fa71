"""Which modules the scripts of this node import: recorded by a worker at its first step (`holdfast.train.imports`), read when
the next one is started.

Kept in a directory of the agent, by what is run: a job that is submitted again begins with what its last run has shown."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

import structlog

from holdfast.domain.job import LaunchSpec

log = structlog.get_logger("holdfast.agent.learned")

AUTO = "auto"  # of `preload`
FILE_BYTES_MAX = 1 << 20
MODULES_MAX = 4000
MORE_MIN = 20  # modules: fewer new ones are no reason for another template


class Learned:
    """The lists in `directory`. A file is written by the user's process: what is not a list of names is ignored."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._taken: dict[Path, tuple[str, ...]] = {}  # by file, the list that templates were made for

    def path(self, launch: LaunchSpec) -> Path:
        """Where a worker of this launch writes its list."""
        key = json.dumps([launch.script, launch.module, launch.command])
        return self._directory / f"{zlib.crc32(key.encode()):08x}.json"

    def modules(self, launch: LaunchSpec) -> tuple[str, ...]:
        """The modules to import for this launch; a list that has hardly grown stays as it was."""
        if AUTO not in launch.preload:
            return ()
        path = self.path(launch)
        found, taken = _read(path), self._taken.get(path, ())
        if len(set(found) - set(taken)) >= MORE_MIN:
            self._taken[path] = found
        return self._taken.get(path, ())


def _read(path: Path) -> tuple[str, ...]:
    try:
        if not 0 < os.stat(path).st_size <= FILE_BYTES_MAX:
            return ()
        names = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return ()
    good = (name for name in dict.fromkeys(names) if all(part.isidentifier() for part in name.split(".")))
    return tuple(good)[:MODULES_MAX]
