"""A fault that a rank does to itself, once, at a (rank, step): `kill:1:17` or `hang:0:31`, so what:rank:step.

A file below the given directory says that it has struck, so that the same step passes when it is done again."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}


class Strike:
    def __init__(self, reported: str) -> None:
        what, rank, step = reported.split(":")
        self._signal = SIGNALS[what]
        self._here = rank == os.environ["RANK"]
        self._step = int(step)

    def at(self, step: int, directory: Path) -> None:
        """`step` is the one that is being done, counted from one."""
        if self._here and step == self._step:
            struck = directory / f"struck-{step}"
            directory.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                struck.touch(exist_ok=False)
                os.kill(os.getpid(), self._signal)
