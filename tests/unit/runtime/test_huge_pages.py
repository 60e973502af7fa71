"""Huge pages for processes that are forked often."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import itertools, mmap, os
from holdfast.runtime.processes.huge_pages import HUGE_PAGE_BYTES, use_huge_pages

def huge_kb():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages:"))

size = 16 * HUGE_PAGE_BYTES
memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for page in range(0, size, mmap.PAGESIZE):
    memory[page : page + 8] = page.to_bytes(8, "little")

def intact():
    return all(memory[page : page + 8] == page.to_bytes(8, "little") for page in range(0, size, mmap.PAGESIZE))

ticks = itertools.count()
assert use_huge_pages(0.0) == 0, "without a budget nothing is done"
few = use_huge_pages(3, lambda: float(next(ticks)))
before = huge_kb()
replaced = use_huge_pages(60.0)
assert intact()
if (child := os.fork()) == 0:
    memory[:8] = b"\\xff" * 8  # of the child alone
    os._exit(0 if intact() is False else 1)
assert os.waitpid(child, 0)[1] == 0 and intact()
print(few, replaced, before, huge_kb())
"""


def test_memory_is_in_huge_pages_with_its_content_within_the_budget() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    few, replaced, before, after = map(int, done.stdout.split())
    if not replaced:
        pytest.skip("this kernel replaces no pages (MADV_COLLAPSE, Linux 6.1)")
    assert few <= 2, "the clock is read before each page"
    assert before < after
