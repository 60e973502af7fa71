"""Memory pages, and what the first touch of one costs."""

from __future__ import annotations

import errno
import mmap

PAGE = 4096
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap module does not name it


def populate(mapping: mmap.mmap) -> None:
    """Have every page present."""
    try:
        mapping.madvise(MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel
            raise
        mapping[::PAGE] = bytes(len(range(0, len(mapping), PAGE)))


def recall(nbytes: int) -> None:
    """Take and free `nbytes`, so that what allocates next gets memory that the machine really has.

    A virtual machine hands free pages back to its host within seconds, and getting them again is several times slower
    than an ordinary page fault: without this, whoever allocates measures the hypervisor.
    """
    with mmap.mmap(-1, nbytes) as mapping:
        populate(mapping)
