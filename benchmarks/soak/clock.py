"""Clocks that jump: a preloaded library adds an offset, which it reads from a small file, to one process's wall clock
(`clock.c`).

A time namespace cannot be used, because it shifts only the monotonic and the boot clock, which do not jump on real machines.
Without a C compiler there is no library, and faults of this kind are skipped.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")
ENV_CLOCK = "SOAK_CLOCK"
BUILD_TIMEOUT_S = 60.0

_OFFSET = struct.Struct("<d")


class Clocks:
    """One offset per name. `environment(name)` is set for the process, and inherited by its children."""

    def __init__(self, directory: Path) -> None:
        """Raises `Unbuildable` if there is no compiler, or if the compilation fails."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._library = _build(directory)

    def environment(self, name: str) -> dict[str, str]:
        path = self._directory / name
        if not path.exists():
            path.write_bytes(_OFFSET.pack(0.0))
        return {"LD_PRELOAD": str(self._library), ENV_CLOCK: str(path)}

    def offset_s(self, name: str) -> float:
        """Return the offset that was set, here or by the process."""
        (offset_s,) = _OFFSET.unpack((self._directory / name).read_bytes())
        return float(offset_s)

    def set(self, name: str, offset_s: float) -> None:
        with (self._directory / name).open("r+b") as file, mmap.mmap(file.fileno(), _OFFSET.size) as map_:
            _OFFSET.pack_into(map_, 0, offset_s)


class Unbuildable(Exception):
    """The library cannot be built; the message has the reason."""


def _build(directory: Path) -> Path:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise Unbuildable("no C compiler (gcc or cc)")
    library = directory / f"clock-{os.getpid()}.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl", "-lpthread"]
    built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False)
    if built.returncode:
        raise Unbuildable(f"{' '.join(command)}: {built.stderr.strip()[-500:]}")
    return library
