"""Huge pages for a process that is forked often.

A fork copies the page table, which has one entry per page. Three forks in a row of a process with torch (as a reaper, its
worker, and a child of that one) took 57 ms of CPU time with 60,000 small pages, and 19 ms with huge ones, on a busy machine.
What a fork writes to is copied in small pages as before, so no more memory is used.

Source: madvise(2), MADV_COLLAPSE, since Linux 6.1."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator

MADV_COLLAPSE = 25
HUGE_PAGE_BYTES = 2 << 20
BUDGET_S = 1.0  # a template with torch takes a quarter of it; data of prepare functions can take much longer


def use_huge_pages(budget_s: float = BUDGET_S, clock: Callable[[], float] = time.monotonic) -> int:
    """Replace the small pages of this process's memory, for at most about `budget_s` seconds. Returns how many huge pages
    there are instead. A kernel that has no such pages, or none to spare, refuses, and nothing changes."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    end, replaced = clock() + budget_s, 0
    for address in _huge_pages():
        if clock() >= end:
            break
        done = madvise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE_PAGE_BYTES), ctypes.c_int(MADV_COLLAPSE))
        replaced += done == 0
    return replaced


def _huge_pages() -> Iterator[int]:
    """Yield the addresses of the huge pages that fit into the writable memory of this process, except for mapped files."""
    with open("/proc/self/maps") as maps:
        regions = [line.split() for line in maps]
    for addresses, access, _, _, _, *name in regions:
        if access == "rw-p" and name in ([], ["[heap]"]):
            start, end = (int(address, 16) for address in addresses.split("-"))
            first = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            yield from range(first, end - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES)
