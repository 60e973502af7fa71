"""The memory tiers of a stack that was killed are swept by the next one, unless somebody still uses them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.memory_root import MEMORY_PREFIX, MEMORY_ROOT, MemoryRoot, sweep


@pytest.fixture
def left() -> Iterator[MemoryRoot]:
    """The root of a stack whose starter is dead: its name says so."""
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    path = MEMORY_ROOT / f"{MEMORY_PREFIX}{dead.pid}-{os.getpid()}"
    (path / "node-0").mkdir(parents=True)
    yield MemoryRoot(path)
    shutil.rmtree(path, ignore_errors=True)


def test_one_in_use_is_kept_and_one_that_nobody_uses_is_removed(left: MemoryRoot) -> None:
    sweep()
    assert (left.path / "node-0").is_dir()
    left.leave()
    sweep()
    assert not left.path.exists()


def test_whoever_inherited_the_lock_uses_it(left: MemoryRoot) -> None:
    agent = [sys.executable, "-c", "input()"]
    with subprocess.Popen(agent, stdin=subprocess.PIPE, pass_fds=[left.lock]) as process:
        left.leave()
        sweep()
        assert left.path.exists()
        process.communicate(b"\n")
    sweep()
    assert not left.path.exists()


def test_only_a_root_that_is_one_is_taken_over(left: MemoryRoot, tmp_path: Path) -> None:
    for path in (tmp_path, left.path / "node-0", MEMORY_ROOT / "holdfast-stack-none"):
        fresh = MemoryRoot(path)
        assert fresh.path != path
        fresh.remove()
        assert not fresh.path.exists()
    left.leave()
