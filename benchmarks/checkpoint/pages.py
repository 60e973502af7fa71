"""Faults in memory pages before a measurement."""

from __future__ import annotations

import errno
import mmap

PAGE = 4096
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap module does not name it


def populate(mapping: mmap.mmap) -> None:
    """Fault in every page of a mapping."""
    try:
        mapping.madvise(MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel
            raise
        mapping[::PAGE] = bytes(len(range(0, len(mapping), PAGE)))


def recall(nbytes: int) -> None:
    """Allocate and free `nbytes`, so that the next allocation gets memory that is present in the machine.

    A virtual machine returns free pages to its host within seconds, and getting them again is several times slower than an
    ordinary page fault. Without this call, an allocation would measure the hypervisor.
    """
    with mmap.mmap(-1, nbytes) as mapping:
        populate(mapping)
