"""Descriptors as a process has them that has many files open."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def room_from_1024_on() -> Iterator[None]:
    """Meanwhile the limit allows descriptors of this size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def from_1024_on(descriptor: int) -> Iterator[int]:
    """A duplicate of the descriptor whose number is 1,024 or more."""
    with room_from_1024_on():
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 1024)
        try:
            yield high
        finally:
            os.close(high)
