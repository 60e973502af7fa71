"""A mounted Secret, written as the kubelet writes it (its AtomicWriter): the files are links through one link that is replaced.

volume/tls.crt -> ..data/tls.crt        volume/..data -> ..2        volume/..2/tls.crt
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path


class KubeletVolume:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._version = 0
        directory.mkdir()

    def write(self, files: Mapping[str, bytes]) -> None:
        """Replace all files at once; the directory before is deleted afterwards."""
        before = self.directory / f"..{self._version}"
        self._version += 1
        current = self.directory / f"..{self._version}"
        current.mkdir()
        for name, content in files.items():
            (current / name).write_bytes(content)
        temporary = self.directory / "..data_tmp"
        temporary.symlink_to(current.name)
        os.rename(temporary, self.directory / "..data")
        for name in files:
            if not (self.directory / name).is_symlink():
                (self.directory / name).symlink_to(f"..data/{name}")
        shutil.rmtree(before, ignore_errors=True)
