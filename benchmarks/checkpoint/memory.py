"""Measures the memory of a save in addition to the state itself."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

INTERVAL_S = 0.03


class Peak:
    """Samples, from `start` to `stop`, the private and shared memory of processes and their descendants.

    Proportional set sizes are summed, so that memory that several processes map (shared memory, or pages not yet copied after a
    fork) counts once. The page cache of files on disk is not included. Reading the sizes takes a few milliseconds per gigabyte
    and delays page faults, so only sample saves that are not timed.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._stopped = threading.Event()
        self._before = 0
        self._peak = 0
        self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)

    def start(self) -> None:
        self._before = self._peak = self._now()
        self._thread.start()

    def stop(self) -> int:
        """Return the difference in bytes between the peak and the start."""
        self._stopped.set()
        self._thread.join()
        return max(self._peak, self._now()) - self._before

    def _sample(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            self._peak = max(self._peak, self._now())

    def _now(self) -> int:
        return sum(map(_proportional_bytes, _with_descendants(self._pids)))


def _with_descendants(pids: Sequence[int]) -> set[int]:
    found: set[int] = set()
    for pid in pids:
        try:
            found |= {pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))}
        except psutil.NoSuchProcess:
            continue
    return found


def _proportional_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0  # the process has ended
    fields = dict(line.split(":", 1) for line in lines[1:])
    return sum(int(fields[name].split()[0]) * 1024 for name in ("Pss_Anon", "Pss_Shmem"))
