"""One directory for the files of a run, deleted at its end."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path


@cache
def directory() -> Path:
    made = Path(tempfile.mkdtemp(prefix="holdfast-fuzz-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
