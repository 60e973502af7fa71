"""What tests may leave behind: processes, found by a mark in their environment or by pid, and files in shared memory.

monkeypatch.setenv(MARK, mark)  …start and end something…  assert marked(mark) == []
"""

from __future__ import annotations

from pathlib import Path

import psutil

from holdfast.cli.memory_root import MEMORY_PREFIX, MEMORY_ROOT

MARK = "TEST_MARK"  # not HOLDFAST_…: those are not handed down


def marked(mark: str) -> list[psutil.Process]:
    """Every process that inherited our mark in its environment, wherever it is in the tree."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def gone(pid: int) -> bool:
    """It has ended; whether somebody has asked for its exit code does not matter."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def memory_of(pid: int) -> list[Path]:
    """Shared memory of the stacks that the process `pid` has started."""
    return list(MEMORY_ROOT.glob(f"{MEMORY_PREFIX}{pid}-*"))
