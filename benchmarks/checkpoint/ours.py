"""Holdfast as used by a worker of an agent: only `hf.launch`, `run.step`, `run.checkpoint` and `run.restore`.

The replicator is started by the benchmark's main process. That process watches the replicator's inventory, and writes one line
`STEP TIER TIME` to the standard input of this process when the shard of a step is in a tier. Lines are read between steps
without waiting.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager

import holdfast.train as hf
from benchmarks.checkpoint.contenders import Progress, timed
from benchmarks.checkpoint.protocol import DISK, PEER
from benchmarks.checkpoint.training import State


class Skipped(Exception):
    """The library did not save."""


class Holdfast:
    warm_saves = 2  # it has two images

    def __init__(self, run: hf.Run, state: State) -> None:
        self._run = run
        self._state = state
        self._steps = 0
        self._saved = -1
        self._reached: dict[tuple[int, str], float] = {}
        self._pending = b""
        os.set_blocking(sys.stdin.fileno(), False)

    def step(self, number: int) -> AbstractContextManager[object]:
        self._steps = number + 1
        return self._run.step(number)

    def poll(self) -> object:
        try:
            self._pending += os.read(sys.stdin.fileno(), 65536)
        except BlockingIOError:
            return None
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            step, tier, moment = line.decode().split()
            self._reached[int(step), tier] = float(moment)
        return None

    def tidy(self) -> None:
        """Does nothing, because the replicator deletes old shards."""

    def save(self, step: int) -> None:
        if not self._run.checkpoint(self._state.tree, self._steps, force=True):
            raise Skipped(f"run.checkpoint skipped the save of step {self._steps}")
        self._saved = self._steps

    def progress(self) -> Progress:
        disk, peer = (self._reached.get((self._saved, tier)) for tier in (DISK, PEER))
        return Progress(disk, max(disk, peer) if disk and peer else None)

    def load(self) -> float | None:
        return None  # done by a process that starts after the end of this one, as in a recovery

    def close(self) -> None:
        """Does nothing, because the background work runs in another process."""


def restore(run: hf.Run, state: State) -> float:
    """Restore in a new process of the job, and return the seconds that this took."""
    return timed(lambda: run.restore(state.tree))
